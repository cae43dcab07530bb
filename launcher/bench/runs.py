"""One supervised run of a bench: its folder, its time limit, and the computer's load meanwhile.

Neighbours: `self_bench.py` chooses the runs, `this_computer.py` measures the load.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from launcher.base import atomic
from launcher.base.home import Home
from launcher.bench import this_computer
from launcher.bench.side_run import SideRun
from launcher.bench.workload import Workload
from launcher.console.output import Output

# A run that takes so long gets nowhere: its start, then each of its steps.
_MAX_START_SECONDS, _MAX_STEP_SECONDS = 1800.0, 60.0

Side = Callable[[Path, Callable[[str], None]], SideRun]


def max_seconds(shape: Workload) -> float:
    """The time limit of a run of so many steps."""
    return _MAX_START_SECONDS + _MAX_STEP_SECONDS * shape.steps


def run_supervised(
    name: str, number: int, shape: Workload, run: Side, folder: Path, output: Output
) -> SideRun:
    """Do one run in a folder of its own and record the computer's load before, during and after. The
    result stays there as `run.json`, so a failure or a Ctrl-C in a later run does not lose it."""
    place = folder / f"{name}-{number}"
    place.mkdir()
    others, before = this_computer.busy_share(), this_computer.load()
    busy, began = this_computer.busy_seconds(), time.monotonic()
    if others > this_computer.BUSY_SHARE:
        output.warn(f"others use {others:.0%} of this computer now: the figures will be less reliable")
    with output.busy(f"{name}, run {number + 1} of {shape.seeds}, {shape.steps} steps") as progress:
        try:
            seen = run(place, progress)
        except KeyboardInterrupt:
            output.note(f"stopped; what was run so far is kept in {folder}")
            raise
    elapsed = time.monotonic() - began
    computer = {
        "busy_before": others,
        "busy_meanwhile": this_computer.share(seen.other_processes_seconds, seen.training_seconds),
        "load_before": before,
        "load_after": this_computer.load(),
        "cores_used": round((this_computer.busy_seconds() - busy) / elapsed, 2),
    }
    output.note(
        f"{name}, run {number + 1} of {shape.seeds}: {seen.median_seconds(shape.first_step):.2f} s a step, "
        f"{seen.training_seconds:.0f} s of training, {seen.seconds:.0f} s in all"
    )
    found = dataclasses.replace(seen, computer=computer)
    atomic.write(place / "run.json", json.dumps(found.to_dict(), indent=1) + "\n")
    return found


def new_folder(home: Home) -> Path:
    """The folder for a bench's logs and our runs' homes."""
    home.benches.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=time.strftime("%Y%m%d-%H%M%S-"), dir=home.benches))
