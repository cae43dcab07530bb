"""`launch bench --against trl`: both sides run one after the other, seed by seed, and compared.

Neighbours: `cli/bench_verb.py` calls, `our_side.py` and `trl_side.py` run, `side_by_side.py` judges,
`bench_report.py` shows. All that can be known to fail is asked before anything runs.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from launcher.base.home import Home
from launcher.bench import our_side, this_computer, trl_environment, trl_side
from launcher.bench.bench_report import Compared
from launcher.bench.ready import our_environment, refuse_what_cannot_run
from launcher.bench.shape import Shape
from launcher.bench.side_by_side import Pair
from launcher.bench.side_run import SideRun
from launcher.models import model_folder
from launcher.screen.output import Output

OPPONENTS = ("trl",)
# A run that takes so long gets nowhere: its start, then each of its steps.
_MOST_START_SECONDS, _MOST_STEP_SECONDS = 1800.0, 60.0

_Side = Callable[[Path, Callable[[str], None]], SideRun]


def against_trl(shape: Shape, output: Output, home: Home) -> Compared:
    """Both sides with each seed, which of them first by turns. Raises PreflightError and JobFailed."""
    refuse_what_cannot_run(home)
    trl_environment.check(home)
    our_environment(home, output)
    with output.busy("building TRL's environment", "once") as progress:
        python = trl_environment.python_of(home, progress)
    folder = new_folder(home)
    model, most = model_folder.tiny_folder(), _MOST_START_SECONDS + _MOST_STEP_SECONDS * shape.steps
    found = Compared(shape, this_computer.described(), str(folder))
    for number in range(shape.seeds):
        task = shape.task(number, model)
        sides: dict[str, _Side] = {
            our_side.NAME: partial(our_side.run, task, home, most),
            trl_side.NAME: partial(trl_side.run, task, python, most),
        }
        order = list(sides) if number % 2 == 0 else list(reversed(sides))
        runs = {side: looked_after(side, number, shape, sides[side], folder, output) for side in order}
        found.runs += runs.values()
        found.pairs.append(Pair.of(runs[our_side.NAME], runs[trl_side.NAME], shape.first_step))
    return found


def looked_after(name: str, number: int, shape: Shape, run: _Side, folder: Path, output: Output) -> SideRun:
    """One run in a folder of its own, and what the computer was like before, meanwhile and after."""
    place = folder / f"{name}-{number}"
    place.mkdir()
    others, before = this_computer.busy_share(), this_computer.load()
    busy, began = this_computer.busy_seconds(), time.monotonic()
    if others > this_computer.BUSY_SHARE:
        output.warn(f"others use {others:.0%} of this computer now: what is measured is worth less")
    with output.busy(f"{name}, seed {number} of {shape.seeds}, {shape.steps} steps") as progress:
        seen = run(place, progress)
    elapsed = time.monotonic() - began
    computer = {
        "busy_before": others,
        "load_before": before,
        "load_after": this_computer.load(),
        "cores_used": round((this_computer.busy_seconds() - busy) / elapsed, 2),
    }
    output.note(
        f"{name}, seed {number}: {seen.median_seconds(shape.first_step):.2f} s a step, "
        f"{seen.training_seconds:.0f} s of training, {seen.seconds:.0f} s in all"
    )
    return dataclasses.replace(seen, computer=computer)


def new_folder(home: Home) -> Path:
    """Where a bench leaves what it ran: logs, and our runs' own homes."""
    folder = home.data / "bench" / time.strftime("%Y%m%d-%H%M%S")
    folder.mkdir(mode=0o700, parents=True)
    return folder
