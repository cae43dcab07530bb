"""launcher/run/ending.py: launch keeps a machine for its results until they are given up.

By name or with a Ctrl-C; not past its deadline, nor when the machine is gone. Of a run that its launch does
not end: `test_take_down_results.py`.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time

import pytest

from launcher.base.errors import NotPulled
from launcher.records import teardown_lock
from launcher.teardown import take_down
from tests.support.ends import PRICE, ended_well, raising, soon
from tests.support.lived import Lives
from tests.support.pretend_machine import PretendMachine
from tests.support.waiting import wait_until

# `soon` is for every test here.
__all__ = ["soon"]

pytestmark = pytest.mark.slow


def test_g29_results_given_up_by_name_end_the_wait_of_launch(live: Lives) -> None:
    def give_up() -> None:
        wait_until(lambda: _at_it(live) == teardown_lock.WAITING_FOR_RESULTS, what="launch keeps the machine")
        (record,) = live.store.list()
        live.store.update(record.id, given_up=True)

    giving_up = threading.Thread(target=give_up)
    giving_up.start()
    begun = time.monotonic()
    lived = live(acts={"pull": raising("OSError")}, price=PRICE, lease_seconds=3600.0)
    giving_up.join()
    assert lived.code == 8, lived.stderr
    assert time.monotonic() - begun < 1800, "the lease is an hour"
    ended_well(lived, with_results=True)


def test_g29_results_that_went_with_a_machine_that_is_gone_are_no_good_end(live: Lives) -> None:
    """The program did what it should; the machine was taken back before its results had come."""

    def take_it_back(machine: PretendMachine) -> None:
        machine.lost = "the machine is gone, with everything after step 3"

    lived = live(prepare=take_it_back, price=PRICE)
    assert lived.code == 8, lived.stderr
    assert lived.record.exit_code == 0
    assert lived.record.unpulled == lived.end["unpulled"] == lived.machine.lost
    assert lived.machine.calls.count("pull") == 1, "there is nothing to wait for"
    ended_well(lived, with_results=True)


def test_g29_results_given_up_by_name_end_a_copy_that_goes_on_and_on(
    live: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It moves, and would for hours: whoever says so has it broken off, when it has had a minute."""
    monkeypatch.setattr(take_down, "TRIES_SECONDS", 0.5)
    machines: list[PretendMachine] = []

    def copy_on_and_on() -> None:
        (record,) = live.store.list()
        live.store.update(record.id, given_up=True)
        wait_until(machines[0].stopped, what="somebody breaks it off")
        raise NotPulled("the results are still on the machine", "it was broken off", None)

    lived = live(acts={"pull": copy_on_and_on}, prepare=machines.append, price=PRICE, lease_seconds=3600.0)
    assert lived.code == 8, lived.stderr
    assert lived.record.unpulled == "it was broken off"
    assert lived.machine.calls.count("pull") == 1
    ended_well(lived, with_results=True)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM], ids=lambda number: number.name)
def test_g29_a_closed_terminal_gives_no_results_up(live: Lives, number: signal.Signals) -> None:
    """Only a name or a Ctrl-C does: results that come later are home."""
    tried = [0]

    def pull() -> None:
        tried[0] += 1
        if tried[0] == 2:
            os.kill(os.getpid(), number)
        if tried[0] < 8:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "somewhere")

    lived = live(acts={"pull": pull}, price=PRICE, lease_seconds=3600.0)
    assert lived.code == 128 + number, lived.stderr
    assert lived.record.unpulled is None and lived.end["results"]
    ended_well(lived, with_results=True)


def test_g29_a_ctrl_c_gives_the_results_up(live: Lives) -> None:
    def interrupt() -> None:
        wait_until(lambda: _at_it(live) == teardown_lock.WAITING_FOR_RESULTS, what="launch keeps the machine")
        os.kill(os.getpid(), signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    lived = live(acts={"pull": raising("OSError")}, price=PRICE, lease_seconds=3600.0)
    interrupting.join()
    assert lived.code == 8, lived.stderr
    ended_well(lived, with_results=True)
    assert lived.record.unpulled


def test_g29_a_machine_is_not_kept_past_its_deadline(live: Lives) -> None:
    lived = live(
        (sys.executable, "-c", "import time; time.sleep(600)"),
        acts={"pull": raising("LaunchError")},
        price=PRICE,
        planned={"deadline_seconds": 12.0},
        lease_seconds=3600.0,
    )
    assert lived.code == 7, lived.stderr
    ended_well(lived, with_results=True)
    assert "the machine is kept" not in lived.stderr and lived.record.unpulled


def _at_it(live: Lives) -> str | None:
    """What whoever ends the one run is doing."""
    for record in live.store.list():
        holder = teardown_lock.owner(live.store.folder(record.id))
        return None if holder is None else holder.doing
    return None
