"""TRL's GRPOTrainer on the task of `launch bench`, by turns with ours, seed by seed, and compared.

    uv run python -m tests.bench.against_trl [--steps N] [--seeds N] [--staleness N] [--json]

Three seeds of 40 steps take some 20 minutes, alone on the computer. The same on both sides: the built-in
model in fp32, LoRA on all linear layers, AdamW at a constant rate, 8 inputs by 8 answers a step, the same
inputs, rewards and lengths. Each side's own: all else. A step of ours ends when the new version is served,
one of TRL's when its optimizer has stepped. Neighbours: `trl/` has the other side and the verdict,
`launcher/bench/` our side.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

from launcher.base import atomic, embedded_models
from launcher.base.home import Home
from launcher.bench import slipway_side, this_computer
from launcher.bench.prerequisites import build_environment, refuse_unable_computer
from launcher.bench.runs import Side, max_seconds, new_folder, run_supervised
from launcher.bench.workload import STEPS, Workload
from launcher.console.output import Output
from tests.bench.trl import trl_side
from tests.bench.trl.report import SEEDS, Compared
from tests.bench.trl.side_by_side import Pair


def compare_with_trl(shape: Workload, output: Output, home: Home) -> Compared:
    """Both sides with each seed, which of them first by turns. Raises PreflightError and JobFailed."""
    refuse_unable_computer(home)
    build_environment(home, output)
    with output.busy("building TRL's environment", "once") as progress:
        python = trl_side.python_of(home, progress)
    folder = new_folder(home)
    model, most = embedded_models.folder_of("tiny"), max_seconds(shape)
    found = Compared(shape, this_computer.described(), str(folder))
    for number in range(shape.seeds):
        task = shape.task(number, model)
        sides: dict[str, Side] = {
            slipway_side.NAME: partial(slipway_side.run, task, home, most),
            trl_side.NAME: partial(trl_side.run, task, python, most),
        }
        order = list(sides) if number % 2 == 0 else list(reversed(sides))
        runs = {side: run_supervised(side, number, shape, sides[side], folder, output) for side in order}
        found.runs += runs.values()
        found.pairs.append(Pair.of(runs[slipway_side.NAME], runs[trl_side.NAME], shape.first_step))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="TRL's GRPOTrainer by turns with ours.")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of each run")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="runs of each side")
    parser.add_argument("--staleness", type=int, help="how many steps old our samples may be")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    asked = parser.parse_args()
    output = Output(as_json=asked.json)
    found = compare_with_trl(Workload(asked.steps, asked.seeds, asked.staleness), output, Home.find())
    data = found.to_dict()
    atomic.write(Path(found.folder) / "bench.json", json.dumps(data, indent=1) + "\n")
    output.result(data, found.text())


if __name__ == "__main__":
    main()
