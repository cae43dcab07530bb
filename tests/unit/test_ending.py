"""launcher/run/ending.py: whatever a call of the machine or of the record raises, the end of a run is total.

The machine is in this process and costs something; record, guardian, relay, minder and signals are real.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.base import clock
from launcher.base.errors import LaunchError, NotPulled
from launcher.cli import ending_verbs
from launcher.ledger import teardown_lock
from launcher.ledger.records import RecordStore
from launcher.machines import machine_of_record
from launcher.results import background_copy
from launcher.run.phase_times import Timings
from launcher.safety import take_down
from launcher.screen.output import Output
from launcher.values.machine import Proof
from tests.support import pretend_machine
from tests.support.environment import PROGRAMS, REPOSITORY
from tests.support.lived import Lived, Lives
from tests.support.pretend_machine import PretendMachine
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

PRICE = 12.0
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
    monkeypatch.setattr(background_copy, "_AGAIN_SECONDS", 0.05)


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
    assert calls[-2:] == ["down", "proof"]
    assert lived.record.state == "verified" and lived.record.ended_by == "launch"
    assert lived.record.proof is not None and lived.record.proof["verified"]
    assert lived.end["event"] == "end" and lived.end["exit_code"] == lived.code
    assert not (lived.folder / "token").exists()
    assert lived.record.guardian is None or not lived.record.guardian.alive()


# ----------------------------------------------------------------- every call of the machine


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
def test_g27_a_machine_that_cannot_be_asked_why_it_is_silent_is_ended_all_the_same(
    live: Lives, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.run.pulse._ANSWER_SECONDS", 0.5)
    first = threading.Event()

    def fall_silent() -> None:
        if first.is_set():
            time.sleep(1.0)
        first.set()

    program = (sys.executable, "-c", "import time; time.sleep(600)")
    lived = live(program, acts={"status": fall_silent, "ended": raising(kind)}, price=PRICE)
    assert lived.code == KINDS[kind][1], lived.stderr
    ended_well(lived, with_results=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", ["secure", "committed", "price_per_hour", "down"])
def test_g27_what_is_only_asked_beside_the_end_changes_no_end(live: Lives, call: str, kind: str) -> None:
    lived = live(acts={call: raising(kind)}, price=PRICE)
    assert lived.code == 0, lived.stderr
    ended_well(lived, with_results=True)
    assert bool(lived.record.troubles or lived.end["troubles"]) == (call != "secure")


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
    real = Timings.usual

    def usual(self: Timings, kind: str, phase: str) -> float | None:
        if phase in ("pull", "down"):
            raise RuntimeError("no statistics")
        return real(self, kind, phase)

    monkeypatch.setattr(Timings, "usual", usual)
    lived = live(price=PRICE)
    assert lived.code == 0, lived.stderr
    assert lived.machine.calls.count("pull") == 1
    assert "the machine is kept" not in "".join(str(item.get("text")) for item in lived.objects)
    ended_well(lived, with_results=True)


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
    every = ("pull", "down", "proof", "committed", "secure", "price_per_hour")
    lived = live(acts={call: raising(kind) for call in every}, price=PRICE, lease_seconds=4.0)
    assert lived.code == 5, lived.stderr
    assert {"pull", "down", "proof"} <= set(lived.machine.calls)


# ----------------------------------------------------------------- every write of the record

WRITES = ("machine", "guardian", *UP, "connect", "url", "work", "minder", "pull", "down", "verified")


def break_writes(monkeypatch: pytest.MonkeyPatch, at: str, kind: str, *, once: bool) -> Callable[[], None]:
    """The write of the record that says `at` raises; not `once`: and each one after it. Gives it back."""
    real = RecordStore.update
    state = {"broken": False}

    def update(self: RecordStore, run_id: str, **changes: Any) -> Any:
        first, armed = not state["broken"], state["broken"] and not once
        if (first and at in (changes.get("state"), *changes)) or armed:
            state["broken"] = True
            raise KINDS[kind][0]()
        return real(self, run_id, **changes)

    monkeypatch.setattr(RecordStore, "update", update)
    return lambda: monkeypatch.setattr(RecordStore, "update", real)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", WRITES)
def test_g27_a_write_of_the_record_that_raises_skips_nothing_of_the_end(
    live: Lives, at: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_writes(monkeypatch, at, kind, once=True)
    lived = live(price=PRICE)
    in_the_end = at in ("pull", "down", "verified")
    assert lived.code == (0 if in_the_end else KINDS[kind][1]), lived.stderr
    ended_well(lived, with_results=WRITES.index(at) > WRITES.index("serve"))
    assert bool(lived.record.troubles) == (at in ("pull", "down"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", ["guardian", "setup", "work", "pull", "verified"])
def test_g27_a_record_that_cannot_be_written_any_more_is_finished_by_the_guardian(
    live: Lives, at: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mend = break_writes(monkeypatch, at, kind, once=False)
    lived = live(price=PRICE)
    assert lived.code == KINDS[kind][1], lived.stderr
    assert lived.machine.calls[-2:] == ["down", "proof"]
    assert lived.record.live, "nobody says that it is down while nobody could write so"
    mend()
    live.die()
    wait_until(lambda: not live.store.load(lived.record.id).live, what="the guardian has written it")
    assert live.store.load(lived.record.id).ended_by == "guardian"


@pytest.mark.parametrize("phase", [*UP, "pull", "down"])
def test_g27_a_full_disk_under_the_record_stops_no_end(live: Lives, phase: str) -> None:
    """What is to become the record is the device on which there is never any room."""

    def fill() -> None:
        (folder,) = live.home.runs.glob("slip-*")
        with contextlib.suppress(FileExistsError):
            (folder / ".record.json.tmp").symlink_to("/dev/full")

    lived = live(acts={phase: fill}, price=PRICE)
    assert lived.code == 3, lived.stderr
    assert "No space left on device" in lived.stderr
    assert lived.machine.calls[-2:] == ["down", "proof"]
    assert ("pull" in lived.machine.calls) == (phase in ("serve", "pull", "down"))
    (lived.folder / ".record.json.tmp").unlink()
    live.die()
    wait_until(lambda: not live.store.load(lived.record.id).live, what="the guardian has written it")


def test_g27_a_disk_that_is_full_in_mid_run_stops_no_end(tmp_path: Path) -> None:
    """On a real file system of 512 KiB, where this user may mount one; else the test above has to do."""
    small = tmp_path / "small"
    small.mkdir()
    program = PROGRAMS / "unit" / "live_on_small_disk.py"
    mount = 'mount -t tmpfs -o size=512k none "$1" && exec "$2" "$3" "$1"'
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", mount, "sh", small, sys.executable, program],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    if done.returncode and done.stderr.startswith(("unshare:", "mount:")):
        pytest.skip(f"this user may not mount a small disk: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["full"], "the disk was full"
    assert said["calls"][-2:] == ["down", "proof"] and "pull" in said["calls"]
    assert said["code"] in (3, 8) and said["live_when_full"]
    assert said["ended_by"] == "guardian" and said["state"] == "verified"
    assert "Traceback" not in said["stderr"]


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


# ----------------------------------------------------------------- results are kept until they are given up


def test_g29_results_given_up_by_name_end_the_wait_of_launch(live: Lives) -> None:
    def give_up() -> None:
        wait_until(lambda: _at_it(live) == teardown_lock.KEEPING, what="launch keeps the machine")
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
        machine.lost = "the machine is gone, with what it had after step 3"

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
        wait_until(lambda: _at_it(live) == teardown_lock.KEEPING, what="launch keeps the machine")
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
        planned={"deadline_seconds": 5.0},
        lease_seconds=3600.0,
    )
    assert lived.code == 7, lived.stderr
    ended_well(lived, with_results=True)
    assert "the machine is kept" not in lived.stderr and lived.record.unpulled


def test_g29_down_says_8_while_launch_keeps_the_machine(live: Lives, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending_verbs, "_KEEPING_SECONDS", 0.5)
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


# ----------------------------------------------------------------- one teardown at a time


def test_g28_down_waits_for_a_launch_that_is_still_bringing_results_home(
    live: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(machine_of_record._KINDS, pretend_machine.KIND, pretend_machine.PLACE)

    def found_by_its_record(machine: PretendMachine) -> None:
        machine.found_again = True  # else `down` would find nothing that it could end a second time

    def pull_slowly() -> None:
        monkeypatch.setattr(ending_verbs, "_ORDERLY_SECONDS", 0.1)  # it is past that, and at it
        time.sleep(3.0)

    outcomes: list[BaseException | int] = []
    down = _down_once_it_works(live, monkeypatch, outcomes, give_up=False)
    program = (sys.executable, "-c", "import time; time.sleep(600)")
    lived = live(program, acts={"pull": pull_slowly}, prepare=found_by_its_record, price=PRICE)
    down.join()
    assert outcomes == [0]
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


def _at_it(live: Lives) -> str | None:
    """What whoever ends the one run is doing."""
    for record in live.store.list():
        holder = teardown_lock.holder(live.store.folder(record.id))
        return None if holder is None else holder.doing
    return None


def _down(live: Lives, outcomes: list[BaseException | int], *, give_up: bool) -> None:
    """`launch down` of the one run, as far as the verb goes."""
    (record,) = live.store.list()
    with open(os.devnull, "w") as nowhere:
        output = Output(stdout=nowhere, stderr=nowhere, environ={})
        try:
            outcomes.append(ending_verbs.down(output, record.id, give_up))
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


# ----------------------------------------------------------------- a laptop that sleeps


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
    monkeypatch.setattr("launcher.run.signals._LOOK_EVERY_SECONDS", 0.2)

    def sleep_and_hang() -> None:
        slept[0] = 3600.0
        time.sleep(600)

    lived = live(acts={"setup": sleep_and_hang}, price=PRICE, planned={"budget": 6.0})
    assert lived.code == 7, lived.stderr
    assert "the budget of $6.00 is spent" in lived.stderr
    ended_well(lived, with_results=False)


# ----------------------------------------------------------------- the first answer


def test_g27_a_first_answer_that_takes_long_ends_no_run(live: Lives, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.run.pulse._ANSWER_SECONDS", 0.3)
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
    monkeypatch.setattr("launcher.run.pulse._ANSWER_SECONDS", 0.2)
    monkeypatch.setattr("launcher.base.patience.LEAST_SECONDS", 1.0)
    over = threading.Event()
    lived = live(acts={"status": lambda: over.wait(30) or None}, price=PRICE)
    over.set()
    assert lived.code == 6, lived.stderr
    assert "the runtime has not answered for 1 s" in lived.stderr
    ended_well(lived, with_results=True)
