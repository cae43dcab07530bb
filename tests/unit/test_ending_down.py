"""`launch down` beside a launch that is there: it ends its run itself, once; `down` waits and says how.

Of a run that its launch does not end: `test_take_down_*.py`.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import pytest

from launcher.backends import machine_from_record
from launcher.base.errors import LaunchError, NotPulled
from launcher.cli import teardown_verbs
from launcher.console.output import Output
from launcher.records.teardown_lock import LockOwner
from launcher.teardown.take_down import ResultsWait
from launcher.types.machine import Proof
from tests.support import pretend_machine
from tests.support.ends import PRICE, UP, ended_well, raising, soon
from tests.support.lived import Lives
from tests.support.pretend_machine import PretendMachine
from tests.support.waiting import wait_until

# `soon` is for every test here.
__all__ = ["soon"]

pytestmark = pytest.mark.slow


def test_g28_down_waits_for_a_launch_that_is_still_bringing_results_home(
    live: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(machine_from_record._KINDS, pretend_machine.KIND, pretend_machine.PLACE)

    def found_by_its_record(machine: PretendMachine) -> None:
        machine.found_again = True  # else `down` would find nothing that it could end a second time

    looks: list[str | None] = []
    waits: set[ResultsWait] = set()  # each has one of its own: for launch to end it, and for a turn to do so
    look = ResultsWait.check

    def looking(keeping: ResultsWait, holder: LockOwner | None) -> None:
        looks.append(holder and holder.who)
        waits.add(keeping)
        look(keeping, holder)

    monkeypatch.setattr(ResultsWait, "check", looking)

    def pull_slowly() -> None:
        wait_until(lambda: "launch" in looks, what="down sees that launch is at it")
        monkeypatch.setattr(teardown_verbs, "_ORDERLY_SECONDS", 0.0)  # and is past that
        wait_until(lambda: looks.count("launch") > 3, what="down goes on waiting")

    outcomes: list[BaseException | int] = []
    down = _down_once_it_works(live, monkeypatch, outcomes, give_up=False)
    program = (sys.executable, "-c", "import time; time.sleep(600)")
    lived = live(program, acts={"pull": pull_slowly}, prepare=found_by_its_record, price=PRICE)
    down.join()
    assert outcomes == [0] and len(waits) == 1
    assert lived.machine.calls.count("pull") == lived.machine.calls.count("down") == 1
    assert lived.record.ended_by == "launch" and lived.code == 143


def test_g28_a_run_that_another_has_ended_is_not_ended_again(live: Lives) -> None:
    """As when `launch` did not hear `launch down`, which then went on without it."""
    go = live.folder / "go"

    def end_it_once_it_works() -> None:
        wait_until(lambda: any(record.minder is not None for record in live.store.list()))
        (record,) = live.store.list()
        proof = Proof(True, "by another").to_dict()
        live.store.update(record.id, state="verified", ended=1.0, ended_by="down", proof=proof)
        go.touch()

    ending = threading.Thread(target=end_it_once_it_works)
    ending.start()
    wait = "import pathlib, sys, time\nwhile not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.1)"
    lived = live((sys.executable, "-c", wait, str(go)), price=PRICE)
    ending.join()
    assert lived.code == 0, lived.stderr
    assert lived.machine.calls == list(UP)
    assert (lived.record.state, lived.record.ended_by) == ("verified", "down")
    assert lived.end["down"] == {"verified": True, "detail": "by another"}
    lived.machine.down()


def test_g28_a_second_down_does_not_make_launch_leave_what_it_is_at(live: Lives) -> None:
    """Two told it to end, one after the other: that is no second Ctrl-C."""

    def be_told_again() -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)

    lived = live(acts={"pull": be_told_again}, price=PRICE)
    assert lived.code == 143, lived.stderr
    ended_well(lived, with_results=True)


def test_g29_down_says_8_while_launch_keeps_the_machine(live: Lives, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teardown_verbs, "_KEEPING_SECONDS", 0.5)
    outcomes: list[BaseException | int] = []
    told = _down_once_it_works(live, monkeypatch, outcomes, give_up=False)

    def end_later() -> None:
        told.join()
        _down(live, outcomes, give_up=True)

    later = threading.Thread(target=end_later)
    later.start()
    program = (sys.executable, "-c", "import time; time.sleep(600)")
    lived = live(program, acts={"pull": raising("OSError")}, price=PRICE, lease_seconds=3600.0)
    later.join()
    kept, ended = outcomes
    assert isinstance(kept, NotPulled) and "is kept" in kept.message
    assert "--give-up-results" in str(kept.hint)
    assert ended == 0, ended
    ended_well(lived, with_results=True)


def _down(live: Lives, outcomes: list[BaseException | int], *, give_up: bool) -> None:
    """`launch down` of the one run, as far as the verb goes."""
    (record,) = live.store.list()
    with open(os.devnull, "w") as nowhere:
        output = Output(stdout=nowhere, stderr=nowhere, environ={})
        try:
            outcomes.append(teardown_verbs.down(output, record.id, give_up))
        except LaunchError as error:
            outcomes.append(error)


def _down_once_it_works(
    live: Lives, monkeypatch: pytest.MonkeyPatch, outcomes: list[BaseException | int], *, give_up: bool
) -> threading.Thread:
    """`launch down` as soon as the program works; it tells this process, which is the launcher."""
    monkeypatch.setattr("launcher.base.home.Home.find", lambda: live.home)

    def run() -> None:
        wait_until(lambda: any(record.minder is not None for record in live.store.list()))
        _down(live, outcomes, give_up=give_up)

    thread = threading.Thread(target=run)
    thread.start()
    return thread
