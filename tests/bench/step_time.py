"""How long a step of the quickstart takes in two checkouts: `python -m tests.bench.step_time BEFORE AFTER`.

    --rounds 3    runs of each, alternated: the first round begins with BEFORE, the next with AFTER, and so on
    --threads 16  rollouts at once, on both sides: the default is not the same in all versions
    --log FILE    keeps the runs; those that it has of these two commits are not made again

Prints a JSON line a run with the median of steps 6 to 40, in seconds from commit to commit as the run's own
`metrics.jsonl` has them, and at the end each side's median of these medians and the ratio, AFTER to BEFORE.
A step is rollouts, training and publication; in steps 11, 21 and 31 a validation as well. The reward is the
letters', which every version knows. Both run in this Python's environment (launcher's), each with its own
checkout's code here and on its machine; a runtime environment that is not there yet is built first. A run
takes about two minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from launcher.base.home import Home
from tests.support.environment import PROGRAMS
from tests.support.launched import Launched
from tests.support.ports import free_port

PROGRAM = PROGRAMS / "e2e" / "quickstart_with_threads.py"
FIRST_STEP, LAST_STEP = 6, 40
RUN_SECONDS = 3600.0
SIDES = ("before", "after")
# Of a commit with changes that are not in it: another time it may be other code.
_DIRTY = "-dirty"


@dataclass(frozen=True)
class Checkout:
    """A side of the comparison."""

    side: str
    folder: Path
    commit: str

    @classmethod
    def of(cls, side: str, folder: Path) -> Checkout:
        """Raises SystemExit where this Python would run other code than the folder's."""
        folder = folder.resolve()
        command = ["git", "-C", str(folder), "describe", "--always", f"--dirty={_DIRTY}"]
        commit = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
        checkout = cls(side, folder, commit)
        look = "import launcher, runtime; print(launcher.__file__); print(runtime.__file__)"
        found = subprocess.run(
            [sys.executable, "-P", "-c", look],
            env={**os.environ, **checkout.environ},
            check=True,
            capture_output=True,
            text=True,
        )
        foreign = [path for path in found.stdout.split() if not Path(path).is_relative_to(folder)]
        if foreign:
            raise SystemExit(f"{folder} is not what would run, but {', '.join(foreign)}")
        return checkout

    @property
    def environ(self) -> dict[str, str]:
        return {"PYTHONPATH": str(self.folder)}


def step_seconds(metrics: Path) -> list[float]:
    """How long each step from FIRST_STEP to LAST_STEP took, from the commit before it to its own."""
    lines = map(json.loads, metrics.read_text().splitlines())
    committed = {line["step"]: line["time"] for line in lines}
    times = [committed[step] for step in range(FIRST_STEP - 1, LAST_STEP + 1)]
    return [later - sooner for sooner, later in pairwise(times)]


def timed_run(checkout: Checkout, seed: int, threads: int) -> dict[str, Any]:
    """One run of the quickstart, in a home of its own whose cache is the user's."""
    with tempfile.TemporaryDirectory(prefix="step-time-") as folder:
        cache = Home.find().cache
        cache.mkdir(parents=True, exist_ok=True)
        (Path(folder) / "cache").symlink_to(cache, target_is_directory=True)
        quickstart = str(checkout.folder / "examples" / "quickstart.py")
        options = ["--reward", "letters", "--seed", str(seed)]
        program = [sys.executable, str(PROGRAM), str(threads), quickstart, *options]
        launched = Launched(
            Path(folder),
            ["--port", str(free_port()), "--", *program, "--steps", str(LAST_STEP)],
            cwd=checkout.folder,
            environ=checkout.environ,
        )
        try:
            assert launched.wait(RUN_SECONDS) == 0, launched.stdout + launched.stderr
            seconds = step_seconds(launched.run_dir / "results" / "metrics.jsonl")
        finally:
            launched.kill_tree()
    return {
        "side": checkout.side,
        "commit": checkout.commit,
        "seed": seed,
        "threads": threads,
        "median_seconds": round(statistics.median(seconds), 4),
        "least_seconds": round(min(seconds), 4),
        "max_seconds": round(max(seconds), 4),
        "load": round(os.getloadavg()[0], 1),
    }


def alternated(checkouts: list[Checkout], rounds: int) -> Iterator[tuple[int, Checkout]]:
    """Each round's number and both sides, each of them first in every other round."""
    for number in range(rounds):
        for checkout in checkouts if number % 2 == 0 else reversed(checkouts):
            yield number, checkout


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the quickstart's steps in two checkouts.")
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--log", type=Path)
    asked = parser.parse_args()
    checkouts = [Checkout.of(side, getattr(asked, side)) for side in SIDES]
    lines = asked.log.read_text().splitlines() if asked.log and asked.log.exists() else []
    kept = {_case(run): run for run in map(json.loads, lines) if not run["commit"].endswith(_DIRTY)}
    medians: dict[str, list[float]] = {side: [] for side in SIDES}
    for seed, checkout in alternated(checkouts, asked.rounds):
        run = kept.get((checkout.side, checkout.commit, seed, asked.threads))
        if run is None:
            run = timed_run(checkout, seed, asked.threads)
            if asked.log:
                with asked.log.open("a") as log:
                    log.write(json.dumps(run) + "\n")
        print(json.dumps(run), flush=True)
        medians[checkout.side].append(run["median_seconds"])
    before, after = (statistics.median(medians[side]) for side in SIDES)
    print(json.dumps({"before_seconds": before, "after_seconds": after, "ratio": round(after / before, 4)}))


def _case(run: dict[str, Any]) -> tuple[str, str, int, int]:
    return run["side"], run["commit"], run["seed"], run["threads"]


if __name__ == "__main__":
    main()
