"""The window before a machine's own timer is armed: the laptop freezes in it, and the machine stops itself.

The machine really runs what SkyPilot's cloud-init has for its boot; its timers are in a hurry.
"""

from __future__ import annotations

import os
import signal

import pytest

from tests.cloud.launched import OURS, RENTED, Launched, collect, running
from tests.cloud.rig import Rig
from tests.support.waiting import wait_until

# Twenty minutes, idle and the margin, are so many seconds then.
_HURRY, _STOPS_SECONDS = 120, 10
_SECONDS = 900.0


def _freeze(rig: Rig) -> None:
    """All of the laptop, also what is started meanwhile."""
    frozen: set[int] = set()
    while new := running(rig, *OURS).keys() - frozen:
        for pid in new:
            os.kill(pid, signal.SIGSTOP)
        frozen |= new


@pytest.mark.slow
@pytest.mark.long
def test_p03_a_machine_whose_laptop_freezes_before_it_is_armed_stops_itself_and_gc_ends_it(rig: Rig) -> None:
    rig.faults("hurry", str(_HURRY))
    launched = Launched(rig, [*RENTED, "--name", "demo", "--", "true"])
    wait_until(lambda: rig.witness("run"), _SECONDS, lambda: f"a machine\n{launched.text}")
    _freeze(rig)
    (run,) = rig.witness("run")
    (stopped,) = wait_until(lambda: rig.witness("shut-down"), _SECONDS, "the machine's own end")
    assert stopped["id"] == run["id"] and "launch ssh demo" not in launched.text
    # Not before its time, and not more after it than a busy computer takes to boot it.
    print(f"stopped {stopped['time'] - run['time']:.1f} s after it was made")
    assert stopped["time"] - run["time"] >= _STOPS_SECONDS
    assert rig.alive() == [run["id"]], "it is stopped, and its disk is paid for"

    for pid in running(rig, *OURS):
        os.kill(pid, signal.SIGKILL)
    removed = collect(rig, "--yes")
    print(removed.output)
    assert "down: verified" in removed.ok()
    assert [one["id"] for one in rig.witness("terminate")] == [run["id"]] and not rig.alive()
