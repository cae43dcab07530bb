"""`launch bench`: its options and help; `commands.py` makes it a verb of `launch`.

Knows nothing of how anything is done: it imports what does the work when asked.
"""

from __future__ import annotations

from typing import Annotated

import typer

from launcher.cli import options


def bench(
    context: typer.Context,
    against: Annotated[
        str | None,
        typer.Option(metavar="TRAINER", help="Run another trainer on the same task, by turns: trl."),
    ] = None,
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Steps of each run.")] = 40,
    seeds: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Runs of each side. Default: 3, or 1 without --against."),
    ] = None,
    staleness: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="How many steps old our samples may be. Default: GRPO's own."),
    ] = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> int:
    """Measure this computer: our speed, or ours and another trainer's side by side."""
    from launcher.cli import bench_verb

    return bench_verb.bench(context.obj.output, against, steps, seeds, staleness)
