"""Usage errors of the command line, in three lines, with the command to type instead.

Neighbours: `commands.py` asks when the parser refuses, and before a verb is called. Knows nothing of runs.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import typer

from launcher.base.errors import UsageError
from launcher.base.suggestions import closest_match
from launcher.cli.invocation import Invocation

VERBS = (
    "up", "plan", "status", "logs", "ssh", "exec", "push", "pull", "export", "report", "open", "down", "gc",
    "doctor", "bench", "env", "config",
)  # fmt: skip
_WITH_PROGRAM = ("ssh", "exec")
# A word that may name a run.
_RUN = re.compile(r"[a-z0-9][a-z0-9-]{0,40}")
# The verbs' names in other tools; some are programs as well.
_OTHER_WORDS = {
    "ps": "status", "ls": "status", "list": "status", "top": "status",
    "stop": "down", "kill": "down", "rm": "down", "delete": "down", "destroy": "down", "terminate": "down",
    "attach": "ssh", "shell": "ssh", "start": "up", "serve": "up", "download": "pull",
}  # fmt: skip


def check_verb(verb: str, invocation: Invocation, dry_run: bool) -> None:
    """Refuse a program after a verb, except after those of a machine, and refuse options of a run before or
    behind a verb, except for `config`, which shows them, and for `up` and `plan`, which are about a run."""
    if verb == "plan":
        return
    if invocation.command is not None and verb not in _WITH_PROGRAM:
        program = shlex.join(invocation.command) or "PROGRAM"
        raise UsageError(f"{verb} runs no program", "this verb takes no program", f"launch -- {program}")
    given = [key for key, value in invocation.flags.items() if value is not None]
    if verb in ("gc", "ssh"):
        given = [key for key in given if key != "yes"]
    given += ["set"] if invocation.sets else []
    if dry_run:
        instead = "launch plan" if verb == "up" else f"launch {verb}"
        raise UsageError(f"--dry-run cannot be used with {verb}", "it is a run's option", instead)
    if verb == "up" and (resumed := invocation.flags.get("resume")) is not None:
        why = "a resumed run goes on with the program that it had"
        again = f"launch --resume {resumed}"
        raise UsageError("--resume cannot be used with up", why, again, without=("up",))
    if given and verb not in ("up", "config"):
        raise _option_of_a_run("--" + given[0].replace("_", "-"), verb)


def _option_of_a_run(option: str, verb: str) -> UsageError:
    return UsageError(
        f"{option} cannot be used with {verb}", "it is an option of a run", f"launch {verb} --help"
    )


def usage_error(
    error: typer.TyperException, own: list[str], known: Sequence[str], of_verbs: Mapping[str, Sequence[str]]
) -> UsageError:
    """The parser's complaint as three lines; a program without `--` and a misspelt word get their hint.

    `known`: the options of a run; `of_verbs`: each verb's own.
    """
    message = error.format_message().partition(" (")[0].rstrip(".")
    words = [word for word in own if not word.startswith("-")]
    stranger = next((word for word in words if f"'{word}'" in message), None)
    if message.startswith("No such command") and stranger is not None:
        return _unknown_verb(stranger, own)
    command = f"launch {words[0]}" if words and words[0] in VERBS else "launch"
    why = "the command line could not be read"
    if message.startswith("No such option"):
        option = message.rpartition(" ")[2]
        if option in known and command != "launch":
            return _option_of_a_run(option, words[0])
        meant = closest_match(option, known if command == "launch" else of_verbs.get(words[0], known))
        message = f"no such option: {option}"
        why = f"did you mean {meant}?" if meant else why
    return UsageError(message, why, f"{command} --help")


def _unknown_verb(stranger: str, own: list[str]) -> UsageError:
    message = f"{stranger} is not a verb of launch"
    if (verb := _OTHER_WORDS.get(stranger)) is not None and not Path(stranger).exists():
        following = own[own.index(stranger) + 1 :]
        run = [word for word in following[:1] if verb != "up" and _RUN.fullmatch(word)]
        return UsageError(message, f"did you mean {verb}?", " ".join(["launch", verb, *run]))
    if shutil.which(stranger) or Path(stranger).exists():
        program = shlex.join(own[own.index(stranger) :])
        return UsageError(message, "a program goes after --", f"launch -- {program}")
    if meant := closest_match(stranger, VERBS):
        return UsageError(message, f"did you mean {meant}?", f"launch {meant}")
    return UsageError(message, f"the verbs are {', '.join(VERBS)}", "launch --help")
