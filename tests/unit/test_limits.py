"""What ends a run, and a pull that is tried for as long as that allows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest

from launcher.base.errors import NotPulled
from launcher.records.lease import Limits
from launcher.results import background_copy
from launcher.types.machine import Machine, PullReport
from tests.support.environment import PROGRAMS, REPOSITORY


def test_g06_what_is_left_is_the_less_of_deadline_and_budget() -> None:
    assert Limits(0.0).left(100.0) is None
    assert Limits(0.0, deadline_seconds=3600).left(600.0) == 3000.0
    assert Limits(0.0, budget=2.0, price_per_hour=12.0).left(0.0) == 600.0
    assert Limits(0.0, 3600, 2.0, 12.0).left(60.0) == 540.0
    assert Limits(0.0, 60, 2.0, 12.0).left(0.0) == 60.0


class _Reluctant:
    """A machine whose results come at the third attempt."""

    def __init__(self) -> None:
        self.attempts = 0

    def pull(self, into: Path, *_: object) -> PullReport:
        self.attempts += 1
        if self.attempts < 3:
            raise NotPulled("not yet", "no", None)
        return PullReport(into, 1, 1, 0.0, 7)


@pytest.mark.process
def test_g22_results_that_are_not_home_are_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_copy, "_RETRY_SECONDS", 0.01)
    machine = _Reluctant()
    report = background_copy.pull_with_retries(cast("Machine", machine), tmp_path, 20.0, lambda: False)
    assert report is not None and report.step == 7 and machine.attempts == 3


def test_g22_whoever_gives_the_results_up_does_not_wait(tmp_path: Path) -> None:
    machine = _Reluctant()
    assert background_copy.pull_with_retries(cast("Machine", machine), tmp_path, 20.0, lambda: True) is None
    assert machine.attempts == 0


def _ahead(*under: str) -> float:
    """How far the clock of costs is ahead of the one that stands still in sleep."""
    done = subprocess.run(
        [*under, sys.executable, PROGRAMS / "unit" / "tell_clocks.py"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    if under and done.returncode and "unshare" in done.stderr:
        pytest.skip(f"this user may not make a time namespace: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


@pytest.mark.process
def test_g31_the_clock_of_costs_and_limits_counts_the_time_asleep() -> None:
    """In a time namespace whose computer has slept a day more."""
    there = _ahead("unshare", "-rT", "--boottime", "86400", "--fork")
    assert there - _ahead() == pytest.approx(86400, abs=60)
