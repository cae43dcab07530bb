"""The hours that a laptop sleeps count: a run whose deadline or budget is over by then ends."""

from __future__ import annotations

import sys
import threading
import time

import pytest

from launcher.base import clock
from tests.support.ends import PRICE, ended_well, soon
from tests.support.lived import Lives
from tests.support.pretend_machine import PretendMachine
from tests.support.waiting import wait_until

# `soon` is for every test here.
__all__ = ["soon"]

pytestmark = pytest.mark.slow


def test_g31_the_hours_a_laptop_sleeps_count_towards_deadline_and_cost(
    live: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its clock is put on by an hour while the program works, as the system does it on waking."""
    real, slept = clock.boot_seconds, [0.0]
    monkeypatch.setattr(clock, "boot_seconds", lambda: real() + slept[0])

    def fall_asleep(machine: PretendMachine) -> None:
        def once_it_works() -> None:
            wait_until(lambda: any(record.minder is not None for record in live.store.list()))
            slept[0] = 3600.0

        threading.Thread(target=once_it_works).start()

    program = (sys.executable, "-c", "import time; time.sleep(600)")
    lived = live(program, prepare=fall_asleep, price=PRICE, planned={"deadline_seconds": 1800.0})
    assert lived.code == 7, lived.stderr
    assert lived.end["cost"] >= PRICE and lived.end["seconds"] >= 3600
    ended_well(lived, with_results=True)


def test_g31_a_budget_is_spent_while_the_laptop_sleeps(live: Lives, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the way up, where only an alarm looks at the clock."""
    real, slept = clock.boot_seconds, [0.0]
    monkeypatch.setattr(clock, "boot_seconds", lambda: real() + slept[0])
    monkeypatch.setattr("launcher.run.signals._POLL_SECONDS", 0.2)

    def sleep_and_hang() -> None:
        slept[0] = 3600.0
        time.sleep(600)

    lived = live(acts={"setup": sleep_and_hang}, price=PRICE, budget=6.0)
    assert lived.code == 7, lived.stderr
    assert "the budget of $6.00 is spent" in lived.stderr
    ended_well(lived, with_results=False)
