"""The options and verbs of `launch`, their help, and which function each one calls.

Neighbours: `main.py` calls `invoke`; a run is `run.py`'s, the verbs are `verbs.py`'s.
Knows nothing of how anything is done: it hands values on, and imports what does the work when asked.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from launcher.base.errors import UsageError, suggestion
from launcher.cli import help_text, options
from launcher.cli.options import Debug, Json
from launcher.screen.output import Output

VERBS = (
    "plan", "status", "logs", "ssh", "exec", "push", "pull", "down", "gc", "doctor", "env", "config",
)  # fmt: skip
_WITH_PROGRAM = ("ssh", "exec")

_HELP = """Train a small open model with your own program and metric, on rented GPUs or on this computer.

\b
launch -- python optimize.py                 run a program against an endpoint that learns, here
launch --gpus H100:4 -- python optimize.py   the same on rented GPUs, priced and agreed to first
launch --name dev                            hold the endpoint: eval "$(launch env dev)" elsewhere

What stands before -- is for launch, what stands behind it is your program. It finds the endpoint
in LAUNCH_BASE_URL, LAUNCH_API_KEY and LAUNCH_MODEL. However the run ends, the results come home
first, then everything that was started is taken down, and that is checked.
"""


# The parameters of `root` that are settings of a run; --max is named for what it is, max being Python's.
_SETTINGS = (
    "model", "name", "resume", "gpus", "infra", "train_gpus", "infer_gpus", "disk", "wandb", "port",
    "openai_env", "budget", "max_price", "yes", "maximum", "lease", "idle", "grace", "copy_rate",
    "keep_output",
)  # fmt: skip
# `launch plan` takes these as well: all but taking up a run.
_OF_A_PLAN = frozenset({*_SETTINGS, "settings", "env_file", "as_json", "debug"} - {"resume"})


@dataclass(frozen=True)
class Invocation:
    """What goes round the option parser; `command` is None without a `--`. The options of a run are added."""

    command: list[str] | None
    output: Output
    flags: Mapping[str, Any] = field(default_factory=dict)
    sets: tuple[str, ...] = ()
    env_file: Path | None = None

    def with_options(self, given: Mapping[str, Any]) -> Invocation:
        """With what the parser read, by parameter, over what there is already."""
        flags = {name: given.get(name) for name in _SETTINGS}
        flags["max"] = flags.pop("maximum")
        flags["infra"] = ",".join(flags["infra"]) if flags["infra"] else None
        env_file = given.get("env_file")
        return replace(
            self,
            flags={key: self.flags.get(key) if value is None else value for key, value in flags.items()},
            sets=(*self.sets, *(given.get("settings") or ())),
            env_file=self.env_file if env_file is None else Path(env_file),
        )


class PlanCommand(help_text.VerbHelp):
    """A verb with the options of a run: those of `launch` itself, so that they cannot differ."""

    def get_params(self, ctx: Any) -> Any:
        return [*self._of_a_run(ctx), *super().get_params(ctx)]

    def invoke(self, ctx: Any) -> Any:
        given = {parameter.name: ctx.params.pop(parameter.name) for parameter in self._of_a_run(ctx)}
        ctx.obj = ctx.obj.with_options(given)
        return super().invoke(ctx)

    def _of_a_run(self, ctx: Any) -> list[Any]:
        return [parameter for parameter in ctx.find_root().command.params if parameter.name in _OF_A_PLAN]


Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help="The run's name or id.", autocompletion=options.run_names, show_default=False
    ),
]
OptionalName = Annotated[
    str | None,
    typer.Argument(
        metavar="NAME",
        help="The run's name or id; all runs without one.",
        autocompletion=options.run_names,
    ),
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
    model: options.Model = None,
    name: options.Name = None,
    resume: options.Resume = None,
    gpus: options.Gpus = None,
    infra: options.Infra = None,
    train_gpus: options.TrainGpus = None,
    infer_gpus: options.InferGpus = None,
    disk: options.Disk = None,
    settings: options.Set = None,
    wandb: options.Wandb = None,
    port: options.Port = None,
    openai_env: options.OpenaiEnv = None,
    env_file: options.EnvFile = None,
    budget: options.Budget = None,
    max_price: options.MaxPrice = None,
    dry_run: options.DryRun = False,
    yes: options.Yes = None,
    maximum: options.Maximum = None,
    lease: options.Lease = None,
    idle: options.Idle = None,
    grace: options.Grace = None,
    copy_rate: options.CopyRate = None,
    keep_output: options.KeepOutput = None,
    as_json: Json = False,
    plain: options.Plain = False,
    debug: Debug = False,
    version: options.Version = False,
) -> int:
    invocation = context.obj = context.obj.with_options(context.params)
    if context.invoked_subcommand is not None:
        _check_verb(context.invoked_subcommand, invocation, dry_run)
        return 0
    if version:
        return _show_version(invocation.output)
    if invocation.command == []:
        raise UsageError(
            "no program behind --", "-- is followed by the program to run", "launch -- python my.py"
        )
    if dry_run:
        return _show_plan(invocation)
    from launcher.run.launching import launch_run

    command = tuple(invocation.command or ())
    return launch_run(invocation.flags, invocation.sets, invocation.env_file, command, invocation.output)


@app.command(cls=PlanCommand, context_settings=help_text.SETTINGS)
def plan(
    context: typer.Context,
    refresh: Annotated[bool, typer.Option("--refresh", help="Fetch the price catalogs anew first.")] = False,
) -> int:
    """Show where a run would be, at what price, and the most it can cost; start nothing."""
    return _show_plan(context.obj, refresh)


@app.command(cls=help_text.VerbHelp, context_settings=help_text.SETTINGS)
def status(
    context: typer.Context, name: OptionalName = None, as_json: Json = False, debug: Debug = False
) -> int:
    """Show the runs, or one run and what its runtime says."""
    from launcher.cli import verbs

    return verbs.status(context.obj.output, name)


@app.command(cls=help_text.VerbHelp, context_settings=help_text.SETTINGS)
def logs(
    context: typer.Context,
    name: Name,
    which: Annotated[
        str, typer.Option(metavar="LOG", help="launch, program, gateway, engine-0, trainer, supervisor, …")
    ] = "launch",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
    debug: Debug = False,
) -> int:
    """Print one of a run's logs."""
    from launcher.cli import verbs

    return verbs.logs(context.obj.output, name, which, follow)


@app.command(cls=help_text.VerbHelp, context_settings=help_text.SETTINGS)
def ssh(
    context: typer.Context,
    name: Name,
    yes: Annotated[
        bool,
        typer.Option("--yes", "-y", help="Have plain `ssh NAME` work too, by one line in ~/.ssh/config."),
    ] = False,
    debug: Debug = False,
) -> int:
    """Enter a run's rented machine, or run what stands behind -- in the shell there."""
    from launcher.cli import remote_verbs

    invocation: Invocation = context.obj
    include = yes or bool(invocation.flags.get("yes"))
    return remote_verbs.ssh(invocation.output, name, invocation.command or [], include)


@app.command(cls=help_text.VerbHelp, context_settings=help_text.SETTINGS)
def exec(  # noqa: A001 - the verb's name
    context: typer.Context, name: Name, as_json: Json = False, debug: Debug = False
) -> int:
    """Run the program behind -- on a run's rented machine, with the runtime's Python."""
    from launcher.cli import remote_verbs

    return remote_verbs.execute(context.obj.output, name, context.obj.command or [])


@app.command(cls=help_text.VerbHelp, context_settings=help_text.SETTINGS)
def push(context: typer.Context, name: Name, as_json: Json = False, debug: Debug = False) -> int:
    """Bring this version of the runtime to a run's rented machine."""
    from launcher.cli import remote_verbs

    return remote_verbs.push(context.obj.output, name)


@app.command(cls=help_text.VerbHelp, context_settings=help_text.SETTINGS)
def pull(context: typer.Context, name: Name, as_json: Json = False, debug: Debug = False) -> int:
    """Bring home the newest checkpoint, metrics and logs of a run."""
    from launcher.cli import verbs

    return verbs.pull(context.obj.output, name)


@app.command(cls=help_text.VerbHelp, context_settings=help_text.SETTINGS)
def down(
    context: typer.Context,
    name: Name,
    give_up: Annotated[
        bool,
        typer.Option("--give-up-results", help="End a rented machine even if its results do not come home."),
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> int:
    """End a run: pull its results, take everything down, check that nothing is left."""
    from launcher.cli import ending_verbs

    return ending_verbs.down(context.obj.output, name, give_up)


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
    infra: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CLOUD",
            help="Ask this cloud for machines too, as when the ledger is lost; those runs were on are asked.",
        ),
    ] = None,
    given_up: Annotated[
        list[str] | None,
        typer.Option(
            "--give-up-results",
            metavar="NAME",
            help="End this run's rented machine even if its results do not come home. Repeat it for more.",
        ),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> int:
    """Find what is left of earlier runs, rented machines too, and remove it, once you agree."""
    from launcher.cli import ending_verbs

    agreed = yes or bool(context.obj.flags.get("yes"))
    return ending_verbs.gc(context.obj.output, older_than, unpulled, agreed, infra or [], given_up or [])


@app.command(cls=help_text.VerbHelp, context_settings=help_text.SETTINGS)
def doctor(context: typer.Context, as_json: Json = False, debug: Debug = False) -> int:
    """Look whether this computer is ready for a run, and say what to do where it is not."""
    from launcher.cli.doctor import doctor

    return doctor(context.obj.output, context.obj.env_file)


@app.command(cls=help_text.VerbHelp, context_settings=help_text.SETTINGS)
def env(
    context: typer.Context,
    name: Name,
    wait: Annotated[
        bool, typer.Option("--wait", help="Until the run has its endpoint, while it starts.")
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> int:
    """Print what points a program at a run: eval "$(launch env NAME)"."""
    from launcher.cli import verbs

    return verbs.env(context.obj.output, name, wait)


@app.command(cls=help_text.VerbHelp, context_settings=help_text.SETTINGS)
def config(context: typer.Context, as_json: Json = False, debug: Debug = False) -> int:
    """Show every setting and where it comes from."""
    from launcher.cli import verbs

    invocation: Invocation = context.obj
    return verbs.config(invocation.output, invocation.flags, invocation.sets, invocation.env_file)


def _check_verb(verb: str, invocation: Invocation, dry_run: bool) -> None:
    """A verb takes no program, but for those of a machine, and none of a run's options; `config` shows them,
    `plan` is about a run."""
    if verb == "plan":
        return
    if invocation.command is not None and verb not in _WITH_PROGRAM:
        raise UsageError(f"launch {verb} runs no program", "a program goes with no verb", "launch -- PROGRAM")
    given = [key for key, value in invocation.flags.items() if value is not None]
    if verb in ("gc", "ssh"):
        given = [key for key in given if key != "yes"]
    given += ["set"] if invocation.sets else []
    if dry_run:
        raise UsageError(f"--dry-run does not go with {verb}", "it is about a run", f"launch {verb}")
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


def _show_plan(invocation: Invocation, refresh: bool = False) -> int:
    from launcher.asking import quote

    flags, sets, env_file = invocation.flags, invocation.sets, invocation.env_file
    return quote.show(invocation.output, flags, sets, env_file, refresh=refresh)


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
