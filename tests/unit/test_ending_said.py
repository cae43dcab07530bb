"""launcher/run/ending.py: what cannot be said of an end skips nothing of it.

Nobody can be told who is at it, how long it usually takes, on the screen or in the streams.
"""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest

from launcher.console.output import Output
from launcher.records import teardown_lock
from launcher.run.phase_times import PhaseTimes
from tests.support.ends import PRICE, ended_well, soon
from tests.support.lived import Lives

# `soon` is for every test here.
__all__ = ["soon"]

pytestmark = pytest.mark.slow


def test_g27_a_process_that_may_open_no_more_files_ends_its_run(
    live: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then nobody can be told who is at it, and what it is doing."""

    def refuse() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), "/proc/1/stat")

    def refuse_from_now_on() -> None:
        monkeypatch.setattr(teardown_lock.ProcessId, "own", refuse)

    lived = live(acts={"setup": refuse_from_now_on}, price=PRICE)
    monkeypatch.undo()
    assert lived.code == 0, lived.stderr
    ended_well(lived, with_results=True)


def test_g27_a_phase_whose_usual_time_is_not_known_is_gone_through(
    live: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = PhaseTimes.usual

    def usual(self: PhaseTimes, kind: str, phase: str) -> float | None:
        if phase in ("pull", "down"):
            raise RuntimeError("no statistics")
        return real(self, kind, phase)

    monkeypatch.setattr(PhaseTimes, "usual", usual)
    lived = live(price=PRICE)
    assert lived.code == 0, lived.stderr
    assert lived.machine.calls.count("pull") == 1
    assert "the machine is kept" not in "".join(str(item.get("text")) for item in lived.objects)
    ended_well(lived, with_results=True)


def test_g27_a_screen_that_cannot_be_drawn_on_skips_neither_pull_nor_down(
    live: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Output.phase

    def phase(self: Output, name: str, *rest: Any) -> Any:
        if name in ("pull", "down"):
            raise RuntimeError("can't start new thread")
        return real(self, name, *rest)

    monkeypatch.setattr(Output, "phase", phase)
    lived = live(price=PRICE)
    assert lived.code == 0, lived.stderr
    ended_well(lived, with_results=True)


def test_g27_streams_that_are_closed_skip_neither_pull_nor_down(
    live: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*words: object) -> None:
        raise ValueError("I/O operation on closed file")

    lived = live(acts={"pull": lambda: monkeypatch.setattr(Output, "_print", refuse)}, price=PRICE)
    assert lived.machine.calls[-3:] == ["pull", "down", "proof"]
    assert lived.code == 0 and lived.record.state == "verified"
    assert lived.record.troubles
