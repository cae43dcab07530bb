"""Slipway's side of a bench: runs `launch -- python slipway_program.py` in a home of its own and reads its
files.

In that home none of the user's settings for `launch` has an effect (for other variables: `child.py`). The
built environments are the user's. Neighbours: `child.py` runs it, `programs/slipway_program.py` is the
program.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launcher.base.errors import JobFailed
from launcher.base.home import Home
from launcher.base.module_command import module_command
from launcher.bench import child
from launcher.bench.side_run import Log, SideRun, Step, build_side_run, lines_of
from launcher.config import runtime_config

NAME = "ours"
_PROGRAM = Path(__file__).parent / "programs" / "slipway_program.py"
# The trainer reports a step's training time, the program the time of its rollouts.
_RESULTS = Path("results")


def run(
    task: dict[str, Any], home: Home, max_seconds: float, folder: Path, progress: Callable[[str], None]
) -> SideRun:
    """One run. Raises JobFailed."""
    own, task_file, log = folder / "home", folder / "task.json", folder / "side.jsonl"
    own.mkdir()
    home.cache.mkdir(parents=True, exist_ok=True)
    (own / "cache").symlink_to(home.cache, target_is_directory=True)
    task_file.write_text(json.dumps(task), encoding="utf-8")
    options = [word for key, value in bench_settings(task).items() for word in ("--set", f"{key}={value}")]
    program = [sys.executable, str(_PROGRAM), str(task_file), str(log)]
    lifetime = child.run(
        "the run of the bench",
        [*module_command("launcher.cli.main"), "--json", "--model", "tiny", *options, "--", *program],
        folder=folder,
        environ=bench_environ(own),
        max_seconds=max_seconds,
        progress=progress,
        at_our_end=signal.SIGTERM,  # it ends its run
    )
    found = Log(log)
    training = found.one("training")
    results = _run_folder(own) / _RESULTS
    steps = _steps(results, training["began"], task["steps"])
    seen = build_side_run(NAME, task["seed"], lifetime, found, steps, folder, training["staleness"])
    requests = [line["measured"] for line in found.of("requests")]
    publications = _publication_seconds(results)
    measured = {"publication_seconds": publications, "requests": requests[0] if requests else None}
    return dataclasses.replace(seen, measured=measured)


def bench_settings(task: dict[str, Any]) -> dict[str, Any]:
    """The settings of the run. It starts from the seed's adapter, as the other side does, and leaves out
    samples older than the bound on staleness."""
    settings = {
        "train.lora.rank": task["rank"],
        "train.lora.alpha": task["alpha"],
        "train.learning_rate": task["learning_rate"],
        "train.seed": task["seed"],
    }
    older = (task["staleness"] or 0) > runtime_config.defaults()["max_staleness"]
    return settings | ({"max_staleness": task["staleness"]} if older else {})


def bench_environ(own: Path) -> dict[str, str]:
    """This process's environment without variables meant for another `launch`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LAUNCH_")}
    return {**kept, "LAUNCH_HOME": str(own)}


def _run_folder(own: Path) -> Path:
    """The folder of the only run in a home."""
    return next((own / "runs").glob("slip-*"))


def _publication_seconds(results: Path) -> list[float]:
    """Seconds from each committed step until its version was served and verified."""
    committed = {line["version"]: line["time"] for line in lines_of(results / "metrics.jsonl")}
    return [
        round(line["time"] - committed[line["version"]], 4)
        for line in lines_of(results / "publications.jsonl")
        if line["outcome"] == "published" and line["version"] in committed
    ]


def _steps(results: Path, began: float, count: int) -> list[Step]:
    """Each step of the program, ended when its version was served."""
    served = {
        line["version"]: line["time"]
        for line in lines_of(results / "publications.jsonl")
        if line["outcome"] == "published"
    }
    told = [line for line in lines_of(results / "grpo.jsonl") if line["kind"] == "step"]
    steps = [
        Step(
            ended=served[line["version"]] - began,
            reward=line["reward"],
            rollout_seconds=line["rollout_seconds"],
            training_seconds=line["train_seconds"],
        )
        for line in told
        if line["version"] in served
    ]
    if len(steps) != count:
        raise JobFailed(
            f"our side has trained and served {len(steps)} of {count} steps",
            "a step that taught nothing, or whose version was kept back, has no time",
            f"less {results / 'grpo.jsonl'}",
        )
    return steps
