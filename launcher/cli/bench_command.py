"""The options and help of `launch bench`; `commands.py` registers it.

Knows nothing of measuring: it imports `bench_verb.py` when called.
"""

from __future__ import annotations

from typing import Annotated

import typer

from launcher.cli import options


def bench(
    context: typer.Context,
    against: Annotated[str | None, typer.Option(hidden=True)] = None,
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Steps of each run.")] = 40,
    seeds: Annotated[int, typer.Option(metavar="N", min=1, help="How many runs.")] = 1,
    staleness: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="How many steps old our samples may be. Default: GRPO's own."),
    ] = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> int:
    """Measure this computer: how fast it runs the quickstart's task."""
    from launcher.cli import bench_verb

    return bench_verb.bench(context.obj.output, against, steps, seeds, staleness)
