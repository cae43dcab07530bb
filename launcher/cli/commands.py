"""The options of `launch`, its help, and all its verbs in their order.

Neighbours: `main.py` calls `invoke`; `run_commands.py`, `results_commands.py` and `bench_command.py` have the
other verbs and their options; a run is `run.py`'s. Does no work itself: it hands values on, and imports a
verb's implementation when it is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from launcher.base.errors import UsageError
from launcher.cli import bench_command, help_text, options, results_commands, run_commands, usage_errors
from launcher.cli.invocation import RUN_OPTIONS, Invocation
from launcher.cli.options import Debug, Json
from launcher.console.output import Output

_HELP = """Train a small open model with your own program and metric, on rented GPUs or on this computer.

\b
launch -- python optimize.py                 train on this computer while your program runs
launch --gpus H100:4 -- python optimize.py   train on rented GPUs; you agree to the price first
launch up --name dev                         start the endpoint alone; eval "$(launch env dev)"

Options go before `--`; your program goes after it. It finds the endpoint in the variables
LAUNCH_BASE_URL, LAUNCH_API_KEY and LAUNCH_MODEL. However the run ends, launch first copies the
results to this computer, then stops everything it started and verifies that nothing is left.
"""


# `launch plan` and `launch config` take these as well: all but taking up a run.
_PLAN_OPTIONS = frozenset({*RUN_OPTIONS, "settings", "env_file", "as_json", "debug"} - {"resume"})


class PlanCommand(help_text.CommandHelp):
    """A verb with the options of a run: those of `launch` itself, so that they cannot differ."""

    options_of_a_run = _PLAN_OPTIONS

    def get_params(self, ctx: Any) -> Any:
        return [*self._of_a_run(ctx), *super().get_params(ctx)]

    def invoke(self, ctx: Any) -> Any:
        given = {parameter.name: ctx.params.pop(parameter.name) for parameter in self._of_a_run(ctx)}
        ctx.obj = ctx.obj.with_options(given)
        return super().invoke(ctx)

    def _of_a_run(self, ctx: Any) -> list[Any]:
        return [it for it in ctx.find_root().command.params if it.name in self.options_of_a_run]


class RunCommand(PlanCommand):
    """A verb that starts a run."""

    options_of_a_run = _PLAN_OPTIONS | {"plain"}


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
    """Parse and run the verb; returns the exit code. Raises UsageError for a command line that cannot be
    parsed."""
    command = typer.main.get_command(app)
    try:
        code = command.main(args=own, prog_name="launch", standalone_mode=False, obj=invocation)
    except typer.TyperException as error:
        known = _options(command)
        verbs: dict[str, Any] = getattr(command, "commands", {})
        of_verbs = {
            name: _options(it) + (known if isinstance(it, PlanCommand) else []) for name, it in verbs.items()
        }
        raise usage_errors.usage_error(error, own, known, of_verbs) from None
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
    trackio: options.Trackio = None,
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
    if version:
        raise typer.Exit(_show_version(invocation.output))
    if context.invoked_subcommand is not None:
        usage_errors.check_verb(context.invoked_subcommand, invocation, dry_run)
        return 0
    if invocation.command == []:
        raise UsageError("no program after --", "the program to run goes after --", "launch -- python my.py")
    return _show_plan(invocation) if dry_run else _run(invocation)


def up(context: typer.Context) -> int:
    """Hold an endpoint without a program, until Ctrl-C; `launch env NAME` lets your programs find it."""
    return _run(context.obj)


def plan(
    context: typer.Context,
    refresh: Annotated[bool, typer.Option("--refresh", help="Fetch new price catalogs first.")] = False,
) -> int:
    """Show where a run would go, the price and the maximum cost. Starts nothing."""
    return _show_plan(context.obj, refresh)


def doctor(
    context: typer.Context,
    ask: Annotated[
        bool,
        typer.Option(
            "--ask",
            help="Ask the clouds with an account here whether they let you in; AWS, to rent.",
        ),
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> int:
    """Check whether this computer is ready for a run, and show a fix for each problem."""
    from launcher.cli.doctor import doctor

    return doctor(context.obj.output, context.obj.env_file, ask=ask)


def config(context: typer.Context) -> int:
    """Show every setting and where it comes from."""
    from launcher.cli import run_verbs

    invocation: Invocation = context.obj
    return run_verbs.config(invocation.output, invocation.flags, invocation.sets, invocation.env_file)


def _run(invocation: Invocation) -> int:
    from launcher.run.launching import launch_run

    command = tuple(invocation.command or ())
    return launch_run(
        invocation.flags,
        invocation.sets,
        invocation.env_file,
        command,
        invocation.output,
        invocation.started_by,
    )


def _show_plan(invocation: Invocation, refresh: bool = False) -> int:
    from launcher.cli import plan_verb

    flags, sets, env_file = invocation.flags, invocation.sets, invocation.env_file
    return plan_verb.show(invocation.output, flags, sets, env_file, refresh=refresh)


def _show_version(output: Output) -> int:
    from importlib.metadata import version

    number = version("slipway-rl")
    output.result({"version": number}, number)
    return 0


_CLASSES: dict[Callable[..., int], type[help_text.CommandHelp]] = {
    up: RunCommand,
    plan: PlanCommand,
    config: PlanCommand,
}
# In the order of the help.
for _verb in (
    up, plan, run_commands.status, run_commands.logs, run_commands.ssh, run_commands.exec, run_commands.push,
    run_commands.pull, results_commands.export, results_commands.report, results_commands.open,
    run_commands.down, run_commands.gc, doctor, bench_command.bench, run_commands.env, config,
):  # fmt: skip
    _class = _CLASSES.get(_verb, help_text.CommandHelp)
    app.command(cls=_class, context_settings=help_text.SETTINGS)(_verb)
