"""launcher/run/ending.py: whatever a call of the machine raises, the end of a run is total.

The machine is in this process and costs something; record, guardian, relay, minder and signals are real.
Neighbours: `test_ending_faults.py` has every call in every phase, without a real guardian.
"""

from __future__ import annotations

import pytest

from tests.support.ends import KINDS, PRICE, UP, ended_well, raising, soon
from tests.support.lived import Lives

# `soon` is for every test here.
__all__ = ["soon"]

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", [*UP, "describe"])
def test_g27_a_call_that_raises_on_the_way_up_skips_nothing_of_the_end(
    live: Lives, call: str, kind: str
) -> None:
    lived = live(acts={call: raising(kind)}, price=PRICE)
    assert lived.code == KINDS[kind][1], lived.stderr
    ended_well(lived, with_results=call == "serve")
    assert lived.record.reason


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", ["make_durable", "committed", "price_per_hour", "down"])
def test_g27_what_is_only_asked_beside_the_end_changes_no_end(live: Lives, call: str, kind: str) -> None:
    lived = live(acts={call: raising(kind)}, price=PRICE)
    assert lived.code == 0, lived.stderr
    ended_well(lived, with_results=True)
    assert bool(lived.record.troubles or lived.end["troubles"]) == (call != "make_durable")


@pytest.mark.parametrize("kind", KINDS)
def test_g27_results_that_cannot_be_copied_are_8_and_the_machine_is_down_after_its_lease(
    live: Lives, kind: str
) -> None:
    lived = live(acts={"pull": raising(kind)}, price=PRICE, lease_seconds=4.0)
    assert lived.code == 8, lived.stderr
    ended_well(lived, with_results=True)
    assert lived.record.unpulled and lived.end["unpulled"]
    assert lived.record.exit_code == lived.end["program_exit_code"] == 0, "the program did what it should"
    assert "the machine is kept for" in "".join(str(item.get("text")) for item in lived.objects)


@pytest.mark.parametrize("kind", KINDS)
def test_g27_a_machine_that_cannot_say_whether_its_disk_stays_is_ended_all_the_same(
    live: Lives, kind: str
) -> None:
    lived = live(acts={"pull": raising(kind), "ephemeral": raising(kind)}, price=PRICE)
    assert lived.code == 8, lived.stderr
    ended_well(lived, with_results=True)
    assert lived.record.unpulled and lived.record.troubles


@pytest.mark.parametrize("kind", KINDS)
def test_g27_results_that_come_at_the_second_attempt_are_home(live: Lives, kind: str) -> None:
    lived = live(acts={"pull": raising(kind, 1)}, price=PRICE)
    assert lived.code == 0, lived.stderr
    ended_well(lived, with_results=True)
    assert lived.record.unpulled is None and lived.end["results"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("times", [1, 10**6])
def test_g27_a_proof_that_cannot_be_asked_for_is_none_and_is_asked_for_again(
    live: Lives, kind: str, times: int
) -> None:
    lived = live(acts={"proof": raising(kind, times)}, price=PRICE)
    assert lived.machine.calls.count("down") == lived.machine.calls.count("proof") == 2
    if times == 1:
        assert lived.code == 0, lived.stderr
        return ended_well(lived, with_results=True)
    assert lived.code == 5, lived.stderr
    assert "could not verify that everything is down" in lived.stderr
    # What launch could not prove the guardian tries, once launch has let go of it.
    assert lived.record.state == "unverified" or lived.record.ended_by == "guardian"
    return None


@pytest.mark.parametrize("kind", KINDS)
def test_g27_a_machine_that_refuses_in_every_way_is_asked_in_every_way(live: Lives, kind: str) -> None:
    every = ("pull", "down", "proof", "committed", "make_durable", "price_per_hour")
    lived = live(acts={call: raising(kind) for call in every}, price=PRICE, lease_seconds=4.0)
    assert lived.code == 5, lived.stderr
    assert {"pull", "down", "proof"} <= set(lived.machine.calls)
