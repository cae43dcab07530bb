"""What the pool sends at staleness 0 trains the adapters of the loop before it, byte for byte (C59).

`tests/support/loop_before.jsonl` has what the loop with a barrier in each step sent, of the commit before the
pool: its bodies are those of the digests in test_client_pool_same.py. Each is replayed, beside what the pool
sends now, by the real gateway's queue and the real trainer: `tests/runtime/replayed.py`.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.shared.checkpoint import ADAPTER_WEIGHTS, checkpoint_name
from runtime.shared.schema import StepRequest
from tests.support.environment import REPOSITORY, runtime_environ, runtime_python
from tests.support.pretend_rollouts import Traced, digest, sent, train
from tests.support.small_run import SmallRun
from tests.unit.test_client_pool_same import CASES, SENT

pytestmark = pytest.mark.slow  # it needs the runtime's environment, and takes seconds

BEFORE = REPOSITORY / "tests" / "support" / "loop_before.jsonl"
# Failures, examples in the place of flat ones, two predictors; and settings of the steps' own.
REPLAYED = ("dynamic trouble", "a schedule")
Steps = list[dict[str, Any]]


def before(case: str) -> Steps:
    """What the loop before the pool sent, and was answered before each step."""
    lines = [json.loads(line) for line in BEFORE.read_text().splitlines()]
    steps = [it for it in lines if it["case"] == case]
    for step in steps:
        step["body"] = json.loads(StepRequest.model_validate(step["body"]).model_dump_json())
    assert [digest(json.dumps(it["body"])) for it in steps] == SENT[case], "not what that loop sent"
    for number, step in enumerate(steps):
        step["body"]["key"] = f"key-{number}"  # was drawn anew for each step
    return steps


def now(case: str, run: SmallRun) -> Steps:
    """The same of the pool."""
    answer, program, changes = CASES[case]
    run.answer = traced = Traced(answer)
    run.drop_flat = True
    train(run, program and program(), **changes)
    return traced.steps(sent(run))


def replayed(folder: Path, traces: dict[str, Steps]) -> dict[str, Steps]:
    """By name, how each step of the traces ended; `folder/NAME` is the state of that run."""
    told = folder / "traces.json"
    told.write_text(json.dumps(traces))
    command = [str(runtime_python()), "-m", "tests.runtime.replayed", str(told), str(folder)]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=runtime_environ(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ended: dict[str, Steps] = {name: [] for name in traces}
    for line in done.stdout.splitlines():
        status = json.loads(line)
        ended[status["name"]].append(status)
    return ended


def adapters(folder: Path, steps: int) -> list[bytes]:
    """Of each step, the file of its weights."""
    names = [checkpoint_name(number) for number in range(1, steps + 1)]
    return [(folder / "checkpoints" / name / ADAPTER_WEIGHTS).read_bytes() for name in names]


@pytest.fixture
def another() -> Iterator[SmallRun]:
    """A second endpoint: a run has one training's steps."""
    small = SmallRun()
    yield small
    small.close()


def test_c59_a_replay_of_the_loop_before_and_of_the_pool_gives_equal_adapters(
    run: SmallRun, another: SmallRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traces: dict[str, Steps] = {}
    for case, own in zip(REPLAYED, (run, another), strict=True):
        monkeypatch.setenv("LAUNCH_BASE_URL", own.base_url)
        traces |= {f"{case}, before": before(case), f"{case}, pool": now(case, own)}
    ended = replayed(tmp_path, traces)
    for case in REPLAYED:
        old, new = (ended[f"{case}, {which}"] for which in ("before", "pool"))
        assert [it["state"] for it in new] == ["published"] * len(SENT[case])
        assert [it["counts"] for it in new] == [it["counts"] for it in old]
        updated = sum(it["metrics"]["updated"] for it in new)
        assert updated == 5, "a step in which nothing is learned compares nothing"
        of_old, of_new = (adapters(tmp_path / f"{case}, {it}", len(new)) for it in ("before", "pool"))
        assert len(set(of_new)) == len(new)
        assert of_new == of_old
