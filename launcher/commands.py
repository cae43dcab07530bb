"""The options and verbs of `launch`, their help, and which function each one calls.

Neighbours: `cli.py` calls `invoke`; a run is `run.py`'s, the verbs are `verbs.py`'s.
Knows nothing of how anything is done: it hands values on, and imports what does the work when asked.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from launcher import help_text
from launcher.errors import UsageError, suggestion
from launcher.output import Output

VERBS = ("status", "logs", "pull", "down", "gc", "doctor", "env", "config")
_WHAT, _MONEY, _LIFETIME, _OUTPUT = "What to run", "Money", "Lifetime", "Output"

_HELP = """Train a small open model with your own program and metric, on rented GPUs or on this computer.

\b
launch -- python optimize.py             run a program against an endpoint that learns, here
launch --model ./my-model --name dev     hold the endpoint until Ctrl-C
eval "$(launch env dev)"                 point another terminal at it

What stands before -- is for launch, what stands behind it is your program. It finds the endpoint
in LAUNCH_BASE_URL, LAUNCH_API_KEY and LAUNCH_MODEL. However the run ends, the results come home
first, then everything that was started is taken down, and that is checked.
"""


@dataclass(frozen=True)
class Invocation:
    """What goes round the option parser; `command` is None without a `--`. `root` adds the run's options."""

    command: list[str] | None
    output: Output
    flags: Mapping[str, Any] = field(default_factory=dict)
    sets: tuple[str, ...] = ()
    env_file: Path | None = None


Json = Annotated[
    bool,
    typer.Option(
        "--json",
        help="One JSON object a line on stdout; what a program prints goes to stderr.",
        rich_help_panel=_OUTPUT,
    ),
]
Plain = Annotated[
    bool, typer.Option("--plain", help="No live line, only plain lines.", rich_help_panel=_OUTPUT)
]
Debug = Annotated[
    bool, typer.Option("--debug", help="Show the traceback of an error.", rich_help_panel=_OUTPUT)
]


def _names(incomplete: str) -> list[str]:
    """The names and ids of the recorded runs, for the shell's completion."""
    from launcher.home import Home
    from launcher.safety.records import RecordStore

    words = [word for record in RecordStore(Home.find()).list() for word in (record.name, record.id) if word]
    return [word for word in words if word.startswith(incomplete)]


Name = Annotated[
    str,
    typer.Argument(metavar="NAME", help="The run's name or id.", autocompletion=_names, show_default=False),
]
OptionalName = Annotated[
    str | None,
    typer.Argument(metavar="NAME", help="The run's name or id; all runs without one.", autocompletion=_names),
]

app = typer.Typer(
    name="launch",
    help=_HELP,
    invoke_without_command=True,
    subcommand_metavar="[VERB] [-- PROGRAM...]",
    rich_markup_mode=None,
    cls=help_text.GroupedHelp,
    pretty_exceptions_enable=False,
    pretty_exceptions_show_locals=False,
    context_settings=help_text.SETTINGS,
)


def invoke(own: list[str], invocation: Invocation) -> int:
    """Parse and do; returns the exit code. Raises UsageError for what cannot be parsed."""
    command = typer.main.get_command(app)
    try:
        code = command.main(args=own, prog_name="launch", standalone_mode=False, obj=invocation)
    except typer.TyperException as error:
        raise _usage_error(error, own) from None
    except typer.Abort:
        raise KeyboardInterrupt from None
    return code if isinstance(code, int) else 0


@app.callback()
def root(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="What to train: a folder, a hub name, or `tiny`, which comes with launch.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A name for the run, instead of its id.", rich_help_panel=_WHAT),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="RUN",
            help="Take up a run that ended or was killed: its name or id. Without -- its own program runs.",
            rich_help_panel=_WHAT,
            autocompletion=_names,
        ),
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(metavar="TYPE:COUNT", help="Rent GPUs (not in this version).", rich_help_panel=_WHAT),
    ] = None,
    infra: Annotated[
        str | None,
        typer.Option(
            metavar="CLOUD/REGION", help="Where to rent them (not in this version).", rich_help_panel=_WHAT
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="A setting of the runtime, such as train.learning_rate=2e-3. Repeat it for more.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    wandb: Annotated[
        str | None,
        typer.Option(
            metavar="MODE",
            help="Log to Weights & Biases: online, offline or disabled.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    port: Annotated[
        str | None,
        typer.Option(
            metavar="PORT",
            help="The endpoint's port on 127.0.0.1. Default: 7453, or the next free one.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    openai_env: Annotated[
        bool | None,
        typer.Option(
            "--openai-env",
            help="Set OPENAI_BASE_URL and OPENAI_API_KEY for the program as well.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    env_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Secrets and ids. Default: .env in this folder.", rich_help_panel=_WHAT
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="DOLLARS",
            help="End before the run costs more. Here a run costs nothing.",
            rich_help_panel=_MONEY,
        ),
    ] = None,
    yes: Annotated[
        bool | None,
        typer.Option("--yes", "-y", help="Do not ask before money is spent.", rich_help_panel=_MONEY),
    ] = None,
    maximum: Annotated[
        str | None,
        typer.Option(
            "--max",
            metavar="TIME",
            help="The deadline: 90s, 15m, 4h. Default: none.",
            rich_help_panel=_LIFETIME,
        ),
    ] = None,
    lease: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="End when this computer was silent for so long: 15s or more. Default: 15m.",
            rich_help_panel=_LIFETIME,
        ),
    ] = None,
    as_json: Json = False,
    plain: Plain = False,
    debug: Debug = False,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", rich_help_panel=_OUTPUT)
    ] = False,
) -> int:
    flags = {
        "model": model, "name": name, "gpus": gpus, "infra": infra, "wandb": wandb, "port": port,
        "openai_env": openai_env, "budget": budget, "yes": yes, "max": maximum, "lease": lease,
        "resume": resume,
    }  # fmt: skip
    invocation = replace(context.obj, flags=flags, sets=tuple(settings or ()), env_file=env_file)
    context.obj = invocation
    if context.invoked_subcommand is not None:
        _check_verb(context.invoked_subcommand, invocation)
        return 0
    if version:
        return _show_version(invocation.output)
    if invocation.command == []:
        raise UsageError(
            "no program behind --", "-- is followed by the program to run", "launch -- python my.py"
        )
    from launcher.run import launch_run

    return launch_run(flags, invocation.sets, env_file, tuple(invocation.command or ()), invocation.output)


@app.command(cls=help_text.VerbHelp, context_settings=help_text.SETTINGS)
def status(
    context: typer.Context, name: OptionalName = None, as_json: Json = False, debug: Debug = False
) -> int:
    """Show the runs, or one run and what its runtime says."""
    from launcher import verbs

    return verbs.status(context.obj.output, name)


@app.command(cls=help_text.VerbHelp, context_settings=help_text.SETTINGS)
def logs(
    context: typer.Context,
    name: Name,
    which: Annotated[
        str, typer.Option(metavar="LOG", help="launch, gateway, engine-0, trainer, supervisor, keeper, …")
    ] = "launch",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
    debug: Debug = False,
) -> int:
    """Print one of a run's logs."""
    from launcher import verbs

    return verbs.logs(context.obj.output, name, which, follow)


@app.command(cls=help_text.VerbHelp, context_settings=help_text.SETTINGS)
def pull(context: typer.Context, name: Name, as_json: Json = False, debug: Debug = False) -> int:
    """Bring home the newest checkpoint, metrics and logs of a run."""
    from launcher import verbs

    return verbs.pull(context.obj.output, name)


@app.command(cls=help_text.VerbHelp, context_settings=help_text.SETTINGS)
def down(context: typer.Context, name: Name, as_json: Json = False, debug: Debug = False) -> int:
    """End a run: pull its results, take everything down, check that nothing is left."""
    from launcher import verbs

    return verbs.down(context.obj.output, name)


@app.command(cls=help_text.VerbHelp, context_settings=help_text.SETTINGS)
def gc(
    context: typer.Context,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    older_than: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Also the checkpoints and samples of runs that ended so long ago: 7d. Results stay.",
        ),
    ] = None,
    unpulled: Annotated[
        bool, typer.Option("--unpulled", help="With --older-than: even where results are not home.")
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> int:
    """Find what is left of earlier runs and remove it, once you agree."""
    from launcher import verbs

    agreed = yes or bool(context.obj.flags.get("yes"))
    return verbs.gc(context.obj.output, older_than, unpulled, agreed)


@app.command(cls=help_text.VerbHelp, context_settings=help_text.SETTINGS)
def doctor(context: typer.Context, as_json: Json = False, debug: Debug = False) -> int:
    """Look whether this computer is ready for a run, and say what to do where it is not."""
    from launcher.doctor import doctor

    return doctor(context.obj.output, context.obj.env_file)


@app.command(cls=help_text.VerbHelp, context_settings=help_text.SETTINGS)
def env(context: typer.Context, name: Name, as_json: Json = False, debug: Debug = False) -> int:
    """Print what points a program at a run: eval "$(launch env NAME)"."""
    from launcher import verbs

    return verbs.env(context.obj.output, name)


@app.command(cls=help_text.VerbHelp, context_settings=help_text.SETTINGS)
def config(context: typer.Context, as_json: Json = False, debug: Debug = False) -> int:
    """Show every setting and where it comes from."""
    from launcher import verbs

    invocation: Invocation = context.obj
    return verbs.config(invocation.output, invocation.flags, invocation.sets, invocation.env_file)


def _check_verb(verb: str, invocation: Invocation) -> None:
    """A verb takes no program, and of a run's options none but `config` shows them."""
    if invocation.command is not None:
        raise UsageError(f"launch {verb} runs no program", "a program goes with no verb", "launch -- PROGRAM")
    given = [key for key, value in invocation.flags.items() if value is not None]
    if verb == "gc":
        given = [key for key in given if key != "yes"]
    given += ["set"] if invocation.sets else []
    if given and verb != "config":
        raise _option_of_a_run("--" + given[0].replace("_", "-"), verb)


def _option_of_a_run(option: str, verb: str) -> UsageError:
    """`config` shows what a run's options come to, where they stand before it; other verbs take none."""
    if verb == "config":
        return UsageError(
            f"{option} stands before the verb", "it is an option of a run", f"launch {option} … config"
        )
    return UsageError(
        f"{option} does not go with {verb}", "it is an option of a run", f"launch {verb} --help"
    )


def _show_version(output: Output) -> int:
    from importlib.metadata import version

    number = version("slipway-rl")
    output.result({"version": number}, number)
    return 0


def _usage_error(error: typer.TyperException, own: list[str]) -> UsageError:
    """The parser's complaint as three lines; a program without `--` and a misspelt word get their hint."""
    message = error.format_message().partition(" (")[0].rstrip(".")
    words = [word for word in own if not word.startswith("-")]
    stranger = next((word for word in words if f"'{word}'" in message), None)
    if message.startswith("No such command") and stranger is not None:
        return _not_a_verb(stranger, own)
    command = f"launch {words[0]}" if words and words[0] in VERBS else "launch"
    why = "the command line could not be read"
    if message.startswith("No such option"):
        option = message.rpartition(" ")[2]
        known = [name for parameter in typer.main.get_command(app).params for name in parameter.opts]
        if option in known and command != "launch":
            return _option_of_a_run(option, words[0])
        meant = suggestion(option, known)
        message = f"no such option: {option}"
        why = f"did you mean {meant}?" if meant else why
    return UsageError(message, why, f"{command} --help")


def _not_a_verb(stranger: str, own: list[str]) -> UsageError:
    message = f"{stranger} is not a verb of launch"
    if shutil.which(stranger) or Path(stranger).exists():
        program = " ".join(own[own.index(stranger) :])
        return UsageError(message, "a program goes behind --", f"launch -- {program}")
    if meant := suggestion(stranger, VERBS):
        return UsageError(message, f"did you mean {meant}?", f"launch {meant}")
    return UsageError(message, f"the verbs are {', '.join(VERBS)}", "launch --help")
