"""Starts a run from Python: `with start(model="tiny") as run:`, in a notebook or a script.

Neighbours: `holder.py` holds it and ends it with this process; `session.py` has its use by a program. The run
is one of `launch`, started as a command; this only asks for it and waits until it is ready.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from launcher.base.module_command import module_command
from launcher.base.sanitize import plain_text as sanitized
from launcher.client import run_lookup
from launcher.client.failures import ClientError, NotConnected
from launcher.client.holder import DONE
from launcher.client.no_progress import MAX_EMPTY_STEPS, check_max_empty_steps
from launcher.client.session import Session

_LAST_LINES = 20


class StartRefused(ClientError):  # noqa: N818 - as the client's other errors
    """These arguments may not start a run from Python."""

    exit_code = 2


@dataclass
class StartedRun(Session):
    """A run that this process started: a Session that can end it. It ends with the process in any case."""

    _launch: _Launch | None = field(default=None, repr=False)

    def down(self) -> int:
        """End the run: results home, everything taken down, proven. Its exit code, by `launch`'s table."""
        assert self._launch is not None  # `start` gives it
        return self._launch.end()

    def __enter__(self) -> StartedRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.down()


def start(
    model: str | None = None,
    *,
    from_run: str | None = None,
    gpus: str | None = None,
    name: str | None = None,
    max: str | None = None,  # noqa: A002 - as the option is called
    budget: float | None = None,
    yes: bool = False,
    settings: Mapping[str, Any] | None = None,
    options: Sequence[str] = (),
    quiet: bool = False,
    max_empty_steps: int = MAX_EMPTY_STEPS,
) -> StartedRun:
    """Start a run and wait until it is ready. `settings` are those of `--set`, `options` launch's others.

    `from_run`: an earlier run to begin with instead of a model, as `--from` names it. For rented GPUs there
    is no prompt about the price: `yes=True` agrees to it, and `max` ("2h") or `budget` (dollars) bounds it.
    Raises StartRefused, and NotConnected with launch's own error if the run does not come up. The output of
    launch goes to stderr, unless `quiet`. `max_empty_steps`: see `connect`.
    """
    check_max_empty_steps(max_empty_steps)
    _check_price_bound(gpus, options, max=max, budget=budget, yes=yes)
    words = [*_options(model=model, gpus=gpus, name=name, max=max, budget=budget)]
    words += [f"--from={from_run}"] if from_run else []
    words += [f"--set={key}={_text(value)}" for key, value in (settings or {}).items()]
    words += ["--yes"] if yes else []
    launch = _Launch([*words, *options], quiet)
    run_id = launch.wait_until_ready()
    try:
        found = run_lookup.find_run(run_id)
        return StartedRun(
            found.endpoint, found.patience, found.run_dir, launch, max_empty_steps=max_empty_steps
        )
    except BaseException:  # a Ctrl-C too: nobody else has the run
        launch.end()
        raise


def _check_price_bound(gpus: str | None, options: Sequence[str], **given: Any) -> None:
    """Money is agreed to with its maximum, here as on the command line."""
    rented = any(word.split("=")[0] in ("--gpus", "--infra", "--yes", "-y") for word in options)
    if rented:
        raise StartRefused(
            "GPUs are rented by start's own arguments", why="options has one of --gpus, --infra, --yes",
            hint='start(gpus="H100:1", yes=True, max="2h")',
        )  # fmt: skip
    if gpus is None or gpus.split(":")[0].lower() == "local":
        return
    if not given["yes"] or (given["max"] is None and given["budget"] is None):
        missing = "yes=True" if not given["yes"] else 'max="2h" or budget=40'
        raise StartRefused(
            f"start(gpus={gpus!r}) needs {missing}",
            why="it rents GPUs, and there is nobody to ask about the price",
            hint=f"launch plan --gpus {gpus}",
        )


def _options(**given: Any) -> Iterator[str]:
    for key, value in given.items():
        if value is not None:
            yield f"--{key}={_text(value)}"


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


class _Launch:
    """The holder with `launch` in it, and its output."""

    def __init__(self, options: Sequence[str], quiet: bool) -> None:
        theirs, self._pipe = os.pipe()
        program = module_command("launcher.client.holder")
        launch = [*run_lookup.LAUNCH_COMMAND, "--json", *options, "--", *program]
        self._process = subprocess.Popen(
            [*program, "--pipe", str(theirs), "--", *launch],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            pass_fds=(theirs,),
            start_new_session=True,
        )
        os.close(theirs)
        self._quiet = quiet
        self._run_id: str | None = None
        self._error: Mapping[str, Any] = {}
        self._last_lines: list[str] = []
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, name="launch", daemon=True)
        self._reader.start()

    def wait_until_ready(self) -> str:
        """The run's id once it answers. Raises NotConnected when it ends before, in launch's own words."""
        try:
            self._ready.wait()
        except BaseException:  # a Ctrl-C while it starts: nothing would end it otherwise
            self.end()
            raise
        if self._run_id is None or self._process.poll() is not None or self._error:
            self.end()
            why = self._error.get("why") or "\n".join(self._last_lines[-_LAST_LINES:]) or None
            message = self._error.get("message") or "the run did not start"
            raise NotConnected(str(message), why=why, hint=self._error.get("hint") or "launch doctor")
        return self._run_id

    def end(self) -> int:
        """Have it end in order, and wait for that; the exit code. Harmless when repeated."""
        pipe, self._pipe = self._pipe, -1
        if pipe >= 0:
            if self._ready.is_set():
                with contextlib.suppress(OSError):
                    os.write(pipe, DONE)
            os.close(pipe)
        code = self._process.wait()
        self._reader.join()
        return code

    def _read(self) -> None:
        assert self._process.stdout is not None  # a pipe, as asked for
        try:
            for line in self._process.stdout:
                self._handle_line(line.rstrip("\n"))
        finally:
            self._ready.set()

    def _handle_line(self, line: str) -> None:
        """One line: launch's objects become text, other lines are passed on."""
        parsed = _parse_event(line)
        event = parsed.get("event")
        if event == "run":
            self._run_id = parsed.get("run_id")
        elif event == "error":
            self._error = parsed.get("error") or {}
        elif event == "ready":
            self._ready.set()
        text = _event_text(parsed) if event else line
        if text:
            self._last_lines = [*self._last_lines[-_LAST_LINES:], text]
            if not self._quiet:
                sys.stderr.write(f"{sanitized(text)}\n")
                sys.stderr.flush()


def _parse_event(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) and "schema" in found else {}


def _event_text(event: Mapping[str, Any]) -> str:
    """The line that an event is worth to a waiting user."""
    match event.get("event"):
        case "run":
            return f"{event.get('run_id')}: starting"
        case "phase" if event.get("state") == "end":
            return f"  {event.get('phase'):<9} {event.get('seconds')} s"
        case "ready":
            return f"ready: {event.get('base_url')}"
        case "warning":
            return str(event.get("text"))
    return ""
