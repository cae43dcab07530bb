"""A loop that sends its steps itself hears the same alarms once each; they are kept for the run's page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from launcher.client.alarms import ADVICE, Alarms
from launcher.client.schema import StepCounts, StepStatus
from launcher.client.step_alarms import FILE, StepAlarms
from tests.support.environment import REPOSITORY


def status(step: int, state: Any = "published", flat: int = 0, cut: int = 0, **metrics: float) -> StepStatus:
    counts = StepCounts(
        groups=8, samples=64, trained=64 - cut, sampled_tokens=100 * (64 - cut), groups_without_variance=flat,
        dropped={"truncated": cut} if cut else {},
    )  # fmt: skip
    found = {"reward": 0.5, "entropy": 0.8, **metrics}
    return StepStatus(id=step, key=str(step), state=state, version=step, counts=counts, metrics=found)


def kept(folder: Path) -> list[tuple[str, int]]:
    lines = map(json.loads, (folder / FILE).read_text().splitlines()) if (folder / FILE).exists() else ()
    return [(it["name"], it["step"]) for it in lines]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def test_c47_what_goes_wrong_is_said_once_with_what_helps_and_kept(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alarms = StepAlarms(lambda: folder)
    for step in range(1, 9):
        alarms.report_step(status(step, cut=32 if step > 4 else 0))
        alarms.report_step(status(step, cut=32 if step > 4 else 0))  # it is told again
    assert kept(folder) == [("truncation", 6)]
    said = capsys.readouterr().err
    assert said.count("ALARM") == 1 and ADVICE["truncation"] in said and "33% of the rollouts" in said


def test_c47_steps_whose_rewards_are_all_equal_have_no_number_and_are_heard(folder: Path) -> None:
    alarms = StepAlarms(lambda: folder)
    alarms.report_step(status(1))
    for number in range(3):
        alarms.report_step(status(0, "empty", flat=8).model_copy(update={"key": f"empty {number}"}))
    assert kept(folder) == [("flat_groups", 1)]


def test_c47_an_optimizer_that_has_its_own_silences_these(folder: Path) -> None:
    alarms = StepAlarms(lambda: folder)
    with alarms.silenced():
        for step in range(1, 6):
            alarms.report_step(status(step, cut=60))
    assert kept(folder) == []
    for step in range(6, 9):
        alarms.report_step(status(step, cut=60))
    assert kept(folder) == [("truncation", 8)]


def test_every_alarm_has_its_advice_and_the_guide_knows_it() -> None:
    names = {name for name, _ in Alarms()._checks()} | {"held_out"}
    guide = (REPOSITORY / "examples" / "guides" / "dspy.md").read_text().partition("## Alarms")[2]
    rows = [line.split("|")[1] for line in guide.partition("\n## ")[0].splitlines() if line.startswith("| `")]
    assert names == set(ADVICE) == {name for row in rows for name in re.findall(r"`(\w+)`", row)}
