"""Ends of lives of `lived.py` in which something raises: what raises, and what such an end promises.

    lived = live(acts={"pull": raising("OSError")}, price=PRICE)
    ended_well(lived, with_results=True)

Neighbours: `pretend_calls.py` and `pretend_life.py` have the same for lives without a guardian and a program.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import pytest

from launcher.base.errors import LaunchError
from launcher.results import background_copy
from tests.support.lived import Lived

PRICE = 12.0
# What is asked of a machine on the way up.
UP = ("arm", "push", "setup", "serve")
# What each kind of error comes to, where it is what ended the run.
KINDS: dict[str, tuple[Callable[[], Exception], int]] = {
    "OSError": (lambda: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "somewhere"), 3),
    "RuntimeError": (lambda: RuntimeError("a library's own"), 1),
    "LaunchError": (lambda: LaunchError("it cannot be done", "nobody knows", None), 1),
}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kept machine's results are asked for again at once."""
    monkeypatch.setattr(background_copy, "_RETRY_SECONDS", 0.05)


def raising(kind: str, times: int = 10**6) -> Callable[[], None]:
    """An act that raises so many times."""
    left = [times]

    def act() -> None:
        if left[0] > 0:
            left[0] -= 1
            raise KINDS[kind][0]()

    return act


def ended_well(lived: Lived, *, with_results: bool) -> None:
    """Results tried, down asked, the proof looked for, and a record that says so."""
    calls = lived.machine.calls
    assert ("pull" in calls) == with_results, calls
    assert calls[-2:] == ["down", "proof"], calls
    assert lived.record.state == "verified" and lived.record.ended_by == "launch", lived.record
    assert lived.record.proof is not None and lived.record.proof["verified"], lived.record
    assert lived.end["event"] == "end" and lived.end["exit_code"] == lived.code, lived.end
    assert not (lived.folder / "token").exists(), "its token is dropped"
    assert lived.record.guardian is None or not lived.record.guardian.alive(), "its guardian is let go"
