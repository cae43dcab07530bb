"""The options and verbs of `launch`, their help, and which function each one calls.

Neighbours: `main.py` calls `invoke`; a run is `run.py`'s, the verbs are `verbs.py`'s.
Knows nothing of how anything is done: it hands values on, and imports what does the work when asked.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from launcher.base.errors import UsageError
from launcher.cli import bench_command, help_text, misuse, options, results_commands
from launcher.cli.invocation import OF_A_RUN, Invocation
from launcher.cli.options import Debug, Json
from launcher.screen.output import Output

_HELP = """Train a small open model with your own program and metric, on rented GPUs or on this computer.

\b
launch -- python optimize.py                 train on this computer while your program runs
launch --gpus H100:4 -- python optimize.py   train on rented GPUs; you agree to the price first
launch --name dev                            start the endpoint alone; eval "$(launch env dev)"

Options go before `--`; your program goes after it. It finds the endpoint in the variables
LAUNCH_BASE_URL, LAUNCH_API_KEY and LAUNCH_MODEL. However the run ends, launch first copies the
results to this computer, then stops everything it started and verifies that nothing is left.
"""


# `launch plan` and `launch config` take these as well: all but taking up a run.
_OF_A_PLAN = frozenset({*OF_A_RUN, "settings", "env_file", "as_json", "debug"} - {"resume"})


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
        help="The run's name or id. Without it: all runs.",
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


def _options(command: Any) -> list[str]:
    return [name for parameter in command.params for name in parameter.opts]


def invoke(own: list[str], invocation: Invocation) -> int:
    """Parse and do; returns the exit code. Raises UsageError for what cannot be parsed."""
    command = typer.main.get_command(app)
    try:
        code = command.main(args=own, prog_name="launch", standalone_mode=False, obj=invocation)
    except typer.TyperException as error:
        known = _options(command)
        verbs: dict[str, Any] = getattr(command, "commands", {})
        of_verbs = {
            name: _options(it) + (known if isinstance(it, PlanCommand) else []) for name, it in verbs.items()
        }
        raise misuse.usage_error(error, own, known, of_verbs) from None
    except typer.Abort:
        raise KeyboardInterrupt from None
    return code if isinstance(code, int) else 0


@app.callback()
def root(
    context: typer.Context,
    model: options.Model = None,
    name: options.Name = None,
    resume: options.Resume = None,
    from_run: options.From = None,
    gpus: options.Gpus = None,
    infra: options.Infra = None,
    train_gpus: options.TrainGpus = None,
    infer_gpus: options.InferGpus = None,
    disk: options.Disk = None,
    settings: options.Set = None,
    wandb: options.Wandb = None,
    port: options.Port = None,
    openai_env: options.OpenaiEnv = None,
    arbor: options.Arbor = None,
    art: options.Art = None,
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
        misuse.check_verb(context.invoked_subcommand, invocation, dry_run)
        return 0
    if version:
        return _show_version(invocation.output)
    if invocation.command == []:
        raise UsageError("no program after --", "the program to run goes after --", "launch -- python my.py")
    if dry_run:
        return _show_plan(invocation)
    from launcher.run.launching import launch_run

    command = tuple(invocation.command or ())
    return launch_run(invocation.flags, invocation.sets, invocation.env_file, command, invocation.output)


@app.command(cls=PlanCommand, context_settings=help_text.SETTINGS)
def plan(
    context: typer.Context,
    refresh: Annotated[bool, typer.Option("--refresh", help="Fetch new price catalogs first.")] = False,
) -> int:
    """Show where a run would go, the price and the maximum cost. Starts nothing."""
    return _show_plan(context.obj, refresh)


@app.command(cls=help_text.VerbHelp, context_settings=help_text.SETTINGS)
def status(
    context: typer.Context, name: OptionalName = None, as_json: Json = False, debug: Debug = False
) -> int:
    """Show all runs, or one run in detail."""
    from launcher.cli import verbs

    return verbs.status(context.obj.output, name)


@app.command(cls=help_text.VerbHelp, context_settings=help_text.SETTINGS)
def logs(
    context: typer.Context,
    name: Name,
    which: Annotated[
        str | None,
        typer.Option(
            metavar="LOG",
            help="launch, program, gateway, engine-0, trainer, supervisor, … Default: launch; program where "
            "your program failed.",
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow it until the run ends.")] = False,
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
        typer.Option("--yes", "-y", help="Make plain `ssh NAME` work too: adds one line to ~/.ssh/config."),
    ] = False,
    debug: Debug = False,
) -> int:
    """Open a shell on a run's rented machine, or run the command after -- there."""
    from launcher.cli import remote_verbs

    invocation: Invocation = context.obj
    include = yes or bool(invocation.flags.get("yes"))
    return remote_verbs.ssh(invocation.output, name, invocation.command or [], include)


@app.command(cls=help_text.VerbHelp, context_settings=help_text.SETTINGS)
def exec(  # noqa: A001 - the verb's name
    context: typer.Context, name: Name, as_json: Json = False, debug: Debug = False
) -> int:
    """Run the program after -- on a run's rented machine, with the runtime's Python."""
    from launcher.cli import remote_verbs

    return remote_verbs.execute(context.obj.output, name, context.obj.command or [])


@app.command(cls=help_text.VerbHelp, context_settings=help_text.SETTINGS)
def push(context: typer.Context, name: Name, as_json: Json = False, debug: Debug = False) -> int:
    """Copy this version of the runtime to a run's rented machine."""
    from launcher.cli import remote_verbs

    return remote_verbs.push(context.obj.output, name)


@app.command(cls=help_text.VerbHelp, context_settings=help_text.SETTINGS)
def pull(context: typer.Context, name: Name, as_json: Json = False, debug: Debug = False) -> int:
    """Copy the newest checkpoint, metrics and logs of a run to this computer."""
    from launcher.cli import verbs

    return verbs.pull(context.obj.output, name)


app.command(cls=help_text.VerbHelp, context_settings=help_text.SETTINGS)(results_commands.export)
app.command(cls=help_text.VerbHelp, context_settings=help_text.SETTINGS)(results_commands.report)
app.command(cls=help_text.VerbHelp, context_settings=help_text.SETTINGS)(results_commands.open)


@app.command(cls=help_text.VerbHelp, context_settings=help_text.SETTINGS)
def down(
    context: typer.Context,
    name: Name,
    give_up: Annotated[
        bool,
        typer.Option("--give-up-results", help="End a rented machine even if its results cannot be copied."),
    ] = False,
    elsewhere: Annotated[
        bool,
        typer.Option("--elsewhere", help="End it although it lives on another computer or container."),
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> int:
    """End a run: pull its results, take everything down, verify that nothing is left."""
    from launcher.cli import ending_verbs

    return ending_verbs.down(context.obj.output, name, give_up, elsewhere)


@app.command(cls=help_text.VerbHelp, context_settings=help_text.SETTINGS)
def gc(
    context: typer.Context,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    older_than: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Also remove checkpoints and samples of runs and benches that ended this long ago: 7d. "
            "Results stay.",
        ),
    ] = None,
    unpulled: Annotated[
        bool,
        typer.Option("--unpulled", help="With --older-than: even if the newest results were never copied."),
    ] = False,
    infra: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CLOUD",
            help="Also search this cloud for machines. Clouds of recorded runs are always searched.",
        ),
    ] = None,
    given_up: Annotated[
        list[str] | None,
        typer.Option(
            "--give-up-results",
            metavar="NAME",
            help="End this run's rented machine even if its results cannot be copied. Repeat it for more.",
        ),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> int:
    """Find what earlier runs left behind, rented machines too, and remove it once you agree."""
    from launcher.cli import ending_verbs

    agreed = yes or bool(context.obj.flags.get("yes"))
    return ending_verbs.gc(context.obj.output, older_than, unpulled, agreed, infra or [], given_up or [])


@app.command(cls=help_text.VerbHelp, context_settings=help_text.SETTINGS)
def doctor(context: typer.Context, as_json: Json = False, debug: Debug = False) -> int:
    """Check whether this computer is ready for a run, and say how to fix what is not."""
    from launcher.cli.doctor import doctor

    return doctor(context.obj.output, context.obj.env_file)


app.command(cls=help_text.VerbHelp, context_settings=help_text.SETTINGS)(bench_command.bench)


@app.command(cls=help_text.VerbHelp, context_settings=help_text.SETTINGS)
def env(
    context: typer.Context,
    name: Name,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until the run has started and has its endpoint.")
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> int:
    """Print the variables that point a program at a run: eval "$(launch env NAME)"."""
    from launcher.cli import verbs

    return verbs.env(context.obj.output, name, wait)


@app.command(cls=PlanCommand, context_settings=help_text.SETTINGS)
def config(context: typer.Context) -> int:
    """Show every setting and where it comes from."""
    from launcher.cli import verbs

    invocation: Invocation = context.obj
    return verbs.config(invocation.output, invocation.flags, invocation.sets, invocation.env_file)


def _show_plan(invocation: Invocation, refresh: bool = False) -> int:
    from launcher.cli import plan_verb

    flags, sets, env_file = invocation.flags, invocation.sets, invocation.env_file
    return plan_verb.show(invocation.output, flags, sets, env_file, refresh=refresh)


def _show_version(output: Output) -> int:
    from importlib.metadata import version

    number = version("slipway-rl")
    output.result({"version": number}, number)
    return 0
