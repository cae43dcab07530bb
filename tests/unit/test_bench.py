"""`launch bench`: its program is told rightly, what it left is read rightly, what cannot be is refused."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path

import pytest

from examples import quickstart
from launcher.base.errors import JobFailed
from launcher.bench import slipway_side
from launcher.bench.child import ProcessLifetime
from launcher.bench.cpu_seconds import ALL
from launcher.bench.runs import run_supervised
from launcher.bench.side_run import Log, SideRun, Step, build_side_run
from launcher.bench.table_footnotes import reasons_not_to_quote
from launcher.bench.workload import Workload
from launcher.client.staleness import check_staleness
from launcher.config import runtime_config
from launcher.console.output import Output
from tests.support.typed import Typed

sys.path.insert(0, str(Path(slipway_side.__file__).parent / "programs"))

TASK = Workload(steps=2).task(0, Path("model"))


def test_the_task_is_the_quickstarts() -> None:
    train, held_out = quickstart.phrases(240, 0, held_out=False), quickstart.phrases(100, 0, held_out=True)
    assert TASK["train"] == [it.english for it in train]
    assert TASK["held_out"] == [it.english for it in held_out]
    assert not set(TASK["train"]) & set(TASK["held_out"])


# ------------------------------------------------------------------ what is read and judged


def run_of(side: str, seconds: list[float], rewards: list[float]) -> SideRun:
    """A run whose steps took so long and earned so much."""
    ends = [sum(seconds[: at + 1]) for at in range(len(seconds))]
    steps = tuple(Step(end, reward, 0.0, 0.0) for end, reward in zip(ends, rewards, strict=True))
    return SideRun(side, 0, ends[-1], 0.0, 0.0, ends[-1], 0.0, (0.0, 0.0), steps)


def side_log(path: Path, *entries: dict) -> Log:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return Log(path)


STRETCHES = (
    {"kind": "evaluation", "began": 110.0, "time": 112.0, "score": 11.0},
    {"kind": "training", "began": 113.0, "time": 133.0, "staleness": 1},
    {"kind": "evaluation", "began": 133.0, "time": 136.0, "score": 20.0},
    {"kind": "settings", "time": 137.0, "settings": {"loss": "grpo"}},
)


def test_start_evaluations_training_and_end_are_apart(tmp_path: Path) -> None:
    log = side_log(tmp_path / "side.jsonl", *STRETCHES)
    seen = build_side_run(
        "ours", 0, ProcessLifetime(100.0, 140.0), log, [Step(20.0, 1.0, 1.0, 1.0)], tmp_path, 1
    )
    stretches = (seen.start_seconds, seen.evaluation_seconds, seen.training_seconds, seen.end_seconds)
    assert stretches == (10.0, 5.0, 20.0, 3.0)
    assert (seen.seconds, seen.scores, seen.staleness) == (40.0, (11.0, 20.0), 1)


def test_a_program_that_left_half_a_log_is_said_so(tmp_path: Path) -> None:
    log = side_log(tmp_path / "side.jsonl", *STRETCHES[:2])
    with pytest.raises(JobFailed, match="did not log everything"):
        build_side_run("ours", 0, ProcessLifetime(100.0, 140.0), log, [], tmp_path)


def test_our_steps_end_when_their_version_is_served(tmp_path: Path) -> None:
    step = {"kind": "step", "reward": 12.0, "rollout_seconds": 1.0, "train_seconds": 0.5}
    told = [{"kind": "compile"}, {**step, "version": 1}, {**step, "version": 2}]
    served = [
        {"version": 0, "outcome": "admitted", "time": 99.0},
        {"version": 1, "outcome": "published", "time": 103.0},
        {"version": 2, "outcome": "refused", "time": 104.0},
        {"version": 2, "outcome": "published", "time": 106.0},
    ]
    committed = [{"version": 1, "time": 102.75}, {"version": 2, "time": 103.5}]
    for name, entries in (("grpo", told), ("publications", served), ("metrics", committed)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(it) + "\n" for it in entries))
    assert [it.ended for it in slipway_side._steps(tmp_path, 100.0, 2)] == [3.0, 6.0]
    assert slipway_side._publication_seconds(tmp_path) == [0.25, 2.5]
    with pytest.raises(JobFailed, match="2 of 3 steps"):
        slipway_side._steps(tmp_path, 100.0, 3)


@pytest.mark.process
@pytest.mark.parametrize(("others", "busy"), [(0.1, False), (0.9, True)])
def test_who_comes_to_the_computer_while_a_side_runs_is_seen_too(
    tmp_path: Path, others: float, busy: bool
) -> None:
    """Idle before; then a side computes 20 of 40 seconds, and somebody else a share of all cores'."""
    elsewhere = others * 40.0 * (os.cpu_count() or 1)
    computed = {"training": {"trainer": 20.0, ALL: 20.0 + elsewhere}}
    quiet = dataclasses.replace(run_of("trl", [1.0] * 40, [10.0] * 40), cpu_seconds=computed)
    assert quiet.other_processes_seconds == pytest.approx(elsewhere)
    seen = run_supervised("trl", 0, Workload(), lambda *_: quiet, tmp_path, Output(as_json=True))
    assert seen.computer["busy_meanwhile"] == pytest.approx(others, abs=0.001)
    assert json.loads((tmp_path / "trl-0" / "run.json").read_text()) == json.loads(json.dumps(seen.to_dict()))
    only = dataclasses.replace(seen, computer={**seen.computer, "busy_before": 0.0})
    assert any("others used" in why for why in reasons_not_to_quote(Workload(), [only], 1)) is busy


# ------------------------------------------------------------------ what cannot be


def test_a_comparison_with_another_trainer_is_elsewhere_and_said_so_before_anything_is_done(
    tmp_path: Path,
) -> None:
    done = Typed(tmp_path / "project", tmp_path / "home")("bench", "--against", "trl")
    assert done.returncode == 2
    assert "Hint: uv run python -m tests.bench.against_trl" in done.stderr
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(
    "words", [("--steps", "0"), ("--seeds", "0"), ("--staleness", "-1"), ("--steps", "x")]
)
def test_a_number_that_cannot_be_is_refused(tmp_path: Path, words: tuple[str, str]) -> None:
    done = Typed(tmp_path / "project", tmp_path / "home")("bench", *words)
    assert done.returncode == 2
    assert words[0] in done.stderr and "launch bench --help" in done.stderr


def test_nothing_of_this_user_reaches_our_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAUNCH_GPUS", "H100:8")
    given = slipway_side.bench_environ(tmp_path)
    assert {name: value for name, value in given.items() if name.startswith("LAUNCH_")} == {
        "LAUNCH_HOME": str(tmp_path)
    }


def test_our_run_begins_with_the_seeds_adapter_and_trains_what_is_as_old_as_asked() -> None:
    assert slipway_side.bench_settings(Workload().task(2, Path("model")))["train.seed"] == 2
    for staleness in (None, 0, 1, 5):
        told = slipway_side.bench_settings(Workload(staleness=staleness).task(0, Path("model")))
        check_staleness(staleness or 0, told.get("max_staleness", runtime_config.defaults()["max_staleness"]))
