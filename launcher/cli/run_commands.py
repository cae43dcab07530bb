"""The verbs about one run or all runs: their options and help; `commands.py` registers them.

Each verb imports its implementation when called.
"""

from __future__ import annotations

from typing import Annotated

import typer

from launcher.cli import options
from launcher.cli.invocation import Invocation
from launcher.cli.options import Debug, Json

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


def status(
    context: typer.Context, name: OptionalName = None, as_json: Json = False, debug: Debug = False
) -> int:
    """Show all runs, or one run in detail."""
    from launcher.cli import run_verbs

    return run_verbs.status(context.obj.output, name)


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
    from launcher.cli import run_verbs

    return run_verbs.logs(context.obj.output, name, which, follow)


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


def exec(  # noqa: A001 - the verb's name
    context: typer.Context, name: Name, as_json: Json = False, debug: Debug = False
) -> int:
    """Run the program after -- on a run's rented machine, with the runtime's Python."""
    from launcher.cli import remote_verbs

    return remote_verbs.execute(context.obj.output, name, context.obj.command or [])


def push(context: typer.Context, name: Name, as_json: Json = False, debug: Debug = False) -> int:
    """Copy this version of the runtime to a run's rented machine."""
    from launcher.cli import remote_verbs

    return remote_verbs.push(context.obj.output, name)


def pull(context: typer.Context, name: Name, as_json: Json = False, debug: Debug = False) -> int:
    """Copy the newest checkpoint, metrics and logs of a run to this computer."""
    from launcher.cli import run_verbs

    return run_verbs.pull(context.obj.output, name)


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
    from launcher.cli import teardown_verbs

    return teardown_verbs.down(context.obj.output, name, give_up, elsewhere)


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
    """Find leftovers of earlier runs, rented machines too, and remove them once you agree."""
    from launcher.cli import teardown_verbs

    agreed = yes or bool(context.obj.flags.get("yes"))
    return teardown_verbs.gc(context.obj.output, older_than, unpulled, agreed, infra or [], given_up or [])


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
    from launcher.cli import run_verbs

    return run_verbs.env(context.obj.output, name, wait)
