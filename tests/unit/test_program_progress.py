"""launcher/results/program_progress.py: the steps that are left, and the time that they take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.client.alarms import Alarm
from launcher.client.dspy.report import Journal
from launcher.results.program_progress import ProgramProgress, Progress, progress_of

Line = dict[str, Any]


def begun(steps: int, name: str = "c") -> Line:
    return {"kind": "compile", "compile": name, "steps": steps, "time": 0.0}


def step(number: int, time: float, version: int | None = None, name: str = "c", **others: Any) -> Line:
    return {"kind": "step", "compile": name, "step": number, "version": version, "time": time, **others}


def validation(name: str = "c") -> Line:
    return {"kind": "validation", "compile": name, "time": 0.0}


def test_there_is_no_estimate_before_two_steps_and_no_progress_without_an_optimizer() -> None:
    assert progress_of([]) is None
    assert progress_of([begun(40)]) is None
    one = progress_of([begun(40), validation(), step(1, 10.0, 1)])
    assert one == Progress(40, 39, None, 10.0) and one.seconds_left(12.0) is None
    two = progress_of([begun(40), step(1, 10.0, 1), step(2, 14.0, 2)])
    assert two == Progress(40, 38, 4.0, 14.0)


def test_time_goes_on_until_the_next_step_should_have_ended() -> None:
    progress = Progress(40, 3, 4.0, at=100.0)
    left = [progress.seconds_left(now) for now in (90.0, 100.0, 103.0, 104.0, 900.0)]
    assert left == [12.0, 12.0, 9.0, 8.0, 8.0]
    assert Progress(40, 0, 4.0, at=100.0).seconds_left(101.0) is None


def test_one_step_of_many_hours_changes_nothing_and_validations_count_as_often_as_they_come() -> None:
    lines, now = [begun(100)], 0.0
    for number in range(1, 21):
        now += 36_000.0 if number == 7 else 4.0  # the laptop slept
        now += 26.0 if number % 5 == 1 and number > 1 else 0.0  # of the validation before it
        lines.append(step(number, now, number))
        lines += [validation()] if number % 5 == 0 else []
    progress = progress_of(lines)
    assert progress is not None and progress.step_seconds == pytest.approx((16 * 4.0 + 3 * 30.0) / 19)


def test_a_later_optimizer_of_the_same_run_counts_on_from_the_runs_own_steps() -> None:
    first = [begun(2), step(1, 1.0, 1), step(2, 2.0, 2)]
    assert progress_of(first) == Progress(2, 0, 1.0, 2.0)
    second = [begun(10, "d"), step(1, 9.0, 3, "d"), step(2, 12.0, None, "d")]  # its second taught nothing
    assert progress_of(first + second) == Progress(11, 8, 3.0, 12.0)


def test_a_step_that_was_noted_after_its_end_tells_no_time() -> None:
    lines = [begun(9), step(1, 1.0, 1), step(2, 500.0, 2, late=True), step(3, 501.0, 3), step(4, 503.0, 4)]
    assert progress_of(lines) == Progress(9, 5, 2.0, 503.0)


def test_the_time_between_two_lives_of_a_run_is_no_steps() -> None:
    lives = [step(1, 10.0, 1, program_started=0.0), step(2, 43_210.0, 2, program_started=43_200.0)]
    assert progress_of([begun(40), *lives]) == Progress(40, 38, None, 43_210.0)
    on = [*lives, step(3, 43_214.0, 3, program_started=43_200.0)]
    assert progress_of([begun(40), *on]) == Progress(40, 37, 4.0, 43_214.0)


def test_a_resumed_optimizer_may_have_another_number_of_steps() -> None:
    lines = [begun(40), step(1, 1.0, 1, steps=40), step(2, 2.0, 2, steps=80)]
    assert progress_of(lines) == Progress(80, 78, 1.0, 2.0)


def test_a_later_optimizer_whose_first_step_teaches_nothing_counts_on_too() -> None:
    lines = [begun(2), step(1, 1.0, 1), step(2, 2.0, 2), begun(10, "d"), step(1, 9.0, None, "d")]
    assert progress_of(lines) == Progress(11, 9, None, 9.0)


def test_a_damaged_line_is_passed_over() -> None:
    assert progress_of([{**begun(9), "steps": float("inf")}]) is None
    lines = [begun(9), step(1, 1.0, 1), {"kind": "step", "compile": "c"}, step(2, 2.0, 2)]
    assert progress_of(lines) == Progress(9, 7, 1.0, 2.0)


def test_each_line_of_an_optimizer_has_its_time_and_the_file_is_read_again_when_it_has_grown(
    tmp_path: Path,
) -> None:
    progress = ProgramProgress(tmp_path)
    assert progress.latest() is None
    Journal(tmp_path, 9).alarms([Alarm("flat", 1, "no rollout differs")])
    (line,) = (tmp_path / "grpo.jsonl").read_text().splitlines()
    assert json.loads(line)["time"] > 1.7e9
    with (tmp_path / "grpo.jsonl").open("a") as file:
        for it in (begun(9), step(1, 1.0, 1), step(2, 3.0, 2)):
            file.write(json.dumps(it) + "\n")
    assert progress.latest() == Progress(9, 7, 2.0, 3.0)
