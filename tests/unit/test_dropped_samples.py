"""What a program is told unasked: most of a step left out, a result in a line, an error by its message."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.client import Session, group
from launcher.client.dropped_samples import main_reason
from launcher.client.schema import StepCounts, StepStatus
from tests.support.environment import PROGRAMS, REPOSITORY
from tests.support.small_run import TOKEN, SmallRun


def counts(trained: int, **dropped: int) -> StepCounts:
    samples = trained + sum(dropped.values())
    named = {name.replace("_", " "): count for name, count in dropped.items()}
    return StepCounts(samples=samples, trained=trained, dropped=named)


def trained(run: SmallRun, session: Session, step: int, told: StepCounts) -> StepStatus:
    """A step whose runtime says this of it."""
    run.refuse_empty = False
    run.before_wait = lambda number: run.steps[number].update(counts=told.model_dump())
    return session.step([group(f"g{step}", {f"r{step}": 1.0, f"q{step}": 0.0})])


def said(capfd: pytest.CaptureFixture[str]) -> list[str]:
    return [it for it in capfd.readouterr().err.splitlines() if it.startswith("slipway: ")]


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (counts(6, truncated=58), ["58 of 64", "step 1", "truncated", "max_tokens", "train.overlong=keep"]),
        (counts(0, no_variance_in_its_group=56, stale=8), ["56 of 64", "dynamic_sampling"]),
        (counts(0, stale=4), ["4 of 4", "max_staleness"]),
        (counts(1, something_new=9), ["9 of 10", "something new", "rollouts/"]),
    ],
)
def test_n10_the_first_step_of_which_most_is_left_out_for_one_reason_is_said_once(
    run: SmallRun, capfd: pytest.CaptureFixture[str], told: StepCounts, words: list[str]
) -> None:
    session = run.session()
    for step in (1, 2):
        trained(run, session, step, told)
    (line,) = said(capfd)
    assert all(word in line for word in words), line


def test_n10_each_reason_is_said_once_and_a_healthy_step_takes_no_ones_place(
    run: SmallRun, capfd: pytest.CaptureFixture[str]
) -> None:
    session = run.session()
    flat, cut_off = counts(8, no_variance_in_its_group=56), counts(6, truncated=58)
    for step, told in enumerate((flat, cut_off, counts(0, stale=4), flat, cut_off, counts(0, stale=4)), 1):
        trained(run, session, step, told)
    first, second = said(capfd)
    assert "of step 2 are left out: truncated (" in first and "of step 3 are left out: stale (" in second
    for step, second_of_day in enumerate((41, 59), 7):
        away = StepCounts(samples=8, dropped={f"judge away since 12:03:{second_of_day}": 8})
        trained(run, session, step, away)
    (third,) = said(capfd)
    assert "of step 7 are left out: judge away since 12:03:41 (" in third


def test_n10_half_is_not_said_nor_two_reasons_that_have_most_together() -> None:
    assert main_reason(counts(32, truncated=32)) is None
    assert main_reason(counts(4, truncated=30, stale=30)) is None
    assert main_reason(counts(64)) is None and main_reason(StepCounts()) is None


def test_n10_a_steps_result_prints_in_one_line_and_has_its_fields(run: SmallRun) -> None:
    run.metrics = {f"metric{number}": 0.1 for number in range(60)} | {"reward": 0.25}
    found = trained(run, run.session(), 1, counts(6, stale=2))
    assert str(found) == repr(found) == "<step 1 · published · v1 · trained 6 of 8 · reward 0.250>"
    assert found.counts.dropped == {"stale": 2} and len(found.metrics) == 61


@pytest.mark.process
def test_n10_a_training_that_fails_prints_its_message_and_no_traceback_of_ours(run: SmallRun) -> None:
    program = PROGRAMS / "unit" / "fail_to_train.py"
    done = subprocess.run(
        [sys.executable, str(program)],
        cwd=REPOSITORY,
        env={
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "LAUNCH_BASE_URL": run.base_url,
            "LAUNCH_API_KEY": TOKEN,
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    seen = [line for line in done.stderr.splitlines() if not line.startswith("grpo: ")]
    name = str(Path("tests/programs/unit/fail_to_train.py"))
    assert seen == [
        "TrainingFailed: The program raised in every one of the 8 rollouts of its first step",
        f"ZeroDivisionError: as programs do ({name}:18 in forward)",
        "Hint: run the program once by hand on an example of the trainset",
        f"  at {name}:31 in <module>",
        f"  at {name}:27 in main",
    ]
