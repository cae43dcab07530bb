"""launcher/run/ending.py: a runtime that answers late ends no run, one that never does ends it in time."""

from __future__ import annotations

import sys
import threading
import time

import pytest

from tests.support.ends import KINDS, PRICE, ended_well, raising, soon
from tests.support.lived import Lives

# `soon` is for every test here.
__all__ = ["soon"]

pytestmark = pytest.mark.slow


def test_g27_a_first_answer_that_takes_long_ends_no_run(live: Lives, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.run.runtime_monitor._ANSWER_SECONDS", 0.3)
    asked: list[float] = []

    def slowly() -> None:
        asked.append(time.monotonic())
        if len(asked) <= 2:
            time.sleep(1.5)

    lived = live(acts={"status": slowly}, price=PRICE)
    assert lived.code == 0, lived.stderr
    assert len(asked) >= 2


def test_g23_a_runtime_that_never_answers_at_first_ends_the_run_within_its_patience(
    live: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.run.runtime_monitor._ANSWER_SECONDS", 0.2)
    monkeypatch.setattr("launcher.base.timeout_budget.MIN_SECONDS", 1.0)
    over = threading.Event()
    lived = live(acts={"status": lambda: over.wait(30) or None}, price=PRICE)
    over.set()
    assert lived.code == 6, lived.stderr
    assert "the runtime has not answered for 1 s" in lived.stderr
    ended_well(lived, with_results=True)


@pytest.mark.parametrize("kind", KINDS)
def test_g27_a_machine_that_cannot_be_asked_why_it_is_silent_is_ended_all_the_same(
    live: Lives, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.run.runtime_monitor._ANSWER_SECONDS", 0.5)
    first = threading.Event()

    def fall_silent() -> None:
        if first.is_set():
            time.sleep(1.0)
        first.set()

    program = (sys.executable, "-c", "import time; time.sleep(600)")
    lived = live(program, acts={"status": fall_silent, "ended": raising(kind)}, price=PRICE)
    assert lived.code == KINDS[kind][1], lived.stderr
    ended_well(lived, with_results=True)
