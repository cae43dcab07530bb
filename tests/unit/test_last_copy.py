"""last_copy.py: how long a guardian copies before it ends the machine. The copy is real; clocks are given."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from launcher.base import clock
from launcher.records.records import RecordStore, RunRecord
from launcher.teardown import guardian, last_copy
from launcher.types.machine import PullReport, Stopped
from tests.support import recorded_machine
from tests.support.left_alone import PRICE, left_alone, store, there, typed
from tests.support.waiting import wait_until

__all__ = ["store", "there", "typed"]

pytestmark = pytest.mark.process

LEASE = 900.0


@dataclass
class Clocks:
    """All clocks that are asked, as one that only `pass_by` moves; and how often they were."""

    now: float
    looks: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def ask(self) -> float:
        with self.lock:
            self.looks += 1
            return self.now

    def pass_by(self, seconds: float, stopped: Stopped) -> None:
        """Once whoever watches has seen what is there now, or is there no more."""
        before = self.looks
        wait_until(lambda: stopped() or self.looks > before + 8, what="it is looked at")
        with self.lock:
            self.now += seconds


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    clocks = Clocks(time.time())
    monkeypatch.setattr(last_copy, "time", SimpleNamespace(monotonic=clocks.ask, time=clocks.ask))
    monkeypatch.setattr(last_copy, "clock", SimpleNamespace(boot_seconds=clocks.ask))
    ahead = clock.boot_seconds() - clocks.now
    monkeypatch.setattr(clock, "boot_seconds", lambda: clocks.ask() + ahead)
    monkeypatch.setattr(last_copy, "_POLL_SECONDS", 0.005)
    return clocks


def trickling(folder: Path, clocks: Clocks, rounds: int, seconds: float) -> Callable[[Stopped], str | None]:
    """A copy of which a byte comes each time, with so many seconds between two; until it is stopped."""

    def copy(stopped: Stopped) -> str | None:
        for _ in range(rounds):
            if stopped():
                return "it was broken off"
            with (folder / "partial").open("ab") as file:
                file.write(b"x")
            clocks.pass_by(seconds, stopped)
        return None

    return copy


def never() -> bool:
    return False


def standing_still(clocks: Clocks) -> Callable[[Stopped], str | None]:
    def copy(stopped: Stopped) -> str | None:
        clocks.pass_by(last_copy.STALL_SECONDS + 1, stopped)
        wait_until(stopped, what="nobody waits any more")
        return "it was broken off"

    return copy


def test_p07_a_guardian_goes_on_copying_while_bytes_move(
    store: RecordStore, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = left_alone(store, there, lease_seconds=LEASE)

    def pull(machine: object, into: Path, *_: object) -> PullReport:
        for _ in range(10):
            with (store.folder(record.id) / "partial").open("ab") as file:
                file.write(b"x")
            time.sleep(0.05)
        return PullReport(into, 1, 10, 0.5, 3)

    monkeypatch.setattr(recorded_machine.RecordedMachine, "pull", pull)
    assert guardian._bring_home(store, record, last_copy.SharedLease()) is None


def test_g29_p07_a_last_copy_that_moves_takes_longer_than_its_stillness_may(
    store: RecordStore, there: Path, clocks: Clocks
) -> None:
    record = left_alone(store, there, lease_seconds=LEASE)
    copy = trickling(store.folder(record.id), clocks, 10, last_copy.STALL_SECONDS - 1)
    assert last_copy.copy_results(record, store.folder(record.id), copy, never) is None


def test_g29_p07_a_last_copy_without_a_byte_is_ended(store: RecordStore, there: Path, clocks: Clocks) -> None:
    record = left_alone(store, there, lease_seconds=LEASE)
    why = last_copy.copy_results(record, store.folder(record.id), standing_still(clocks), never)
    assert why == "no bytes arrived for 20 s"


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        ({"lease_seconds": 60.0}, "within the lease of 1m"),
        ({"lease_seconds": LEASE, "deadline_seconds": 60.0}, "the deadline of 1m is reached"),
        ({"budget": PRICE / 60}, "the budget of $0.20 is spent"),
    ],
)
def test_g29_p07_a_last_copy_never_goes_on_past_lease_deadline_or_budget(
    store: RecordStore, there: Path, clocks: Clocks, plan: dict[str, float], why: str
) -> None:
    record = left_alone(store, there, **plan)
    begun = clocks.now
    copy = trickling(store.folder(record.id), clocks, 100, 10.0)
    assert why in str(last_copy.copy_results(record, store.folder(record.id), copy, never))
    assert 60.0 <= clocks.now - begun <= 90.0


def test_g29_p07_what_is_given_up_by_name_ends_a_last_copy(
    store: RecordStore, there: Path, clocks: Clocks
) -> None:
    record = left_alone(store, there, lease_seconds=LEASE)
    copy = trickling(store.folder(record.id), clocks, 100, 1.0)
    why = last_copy.copy_results(
        record, store.folder(record.id), copy, lambda: clocks.now > record.created + 5
    )
    assert why == "the user gave them up" and clocks.now - record.created < 60


def tried_again(
    store: RecordStore, record: RunRecord, monkeypatch: pytest.MonkeyPatch, resting: Callable[[int], object]
) -> RunRecord:
    """The run as its guardian leaves it; `resting` is told how often it has rested."""
    pauses: list[float] = []

    def rest(seconds: float) -> None:
        pauses.append(seconds)
        resting(len(pauses))

    monkeypatch.setattr(guardian, "time", SimpleNamespace(sleep=rest, time=time.time, strftime=time.strftime))
    assert guardian._end(store, record.id, record.launch) == 0
    return store.load(record.id)


def test_p07_a_guardian_that_tries_again_tries_the_last_copy_again(
    store: RecordStore, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = left_alone(store, there, lease_seconds=LEASE)
    for trouble in ("pull-fails", "unproven"):
        (there / trouble).touch()

    def resting(count: int) -> None:
        assert bool(store.load(record.id).unpulled) == (count < 3)
        if count == 2:
            (there / "pull-fails").unlink()
        if count == 4:
            (there / "unproven").unlink()

    assert tried_again(store, record, monkeypatch, resting).unpulled is None
    assert recorded_machine.calls(there) == [*["pull", "down"] * 3, "down", "down"], "at home is at home"


def test_p07_all_last_copies_of_a_guardian_have_one_lease_together(
    store: RecordStore, there: Path, clocks: Clocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = left_alone(store, there, lease_seconds=LEASE)
    for trouble in ("pull-fails", "unproven"):
        (there / trouble).touch()

    def resting(count: int) -> None:
        clocks.now += LEASE / 3
        if count == 5:
            (there / "unproven").unlink()

    assert "rsync" in str(tried_again(store, record, monkeypatch, resting).unpulled)
    assert recorded_machine.calls(there) == [*["pull", "down"] * 3, *["down"] * 3]


def test_p07_what_was_given_up_between_two_tries_is_not_copied_again(
    store: RecordStore, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = left_alone(store, there, lease_seconds=LEASE)
    for trouble in ("pull-fails", "unproven"):
        (there / trouble).touch()

    def resting(count: int) -> None:
        store.update(record.id, given_up=True)
        (there / "unproven").unlink()

    assert tried_again(store, record, monkeypatch, resting).unpulled
    assert recorded_machine.calls(there) == ["pull", "down", "down"]


def test_p07_a_guardian_copies_nothing_anew_where_a_launch_had_come_to_unverified(
    store: RecordStore, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has had its lease, or its user has given them up with Ctrl-C."""
    record = left_alone(store, there, lease_seconds=LEASE)
    record = store.update(record.id, state="unverified", unpulled="the user gave them up")
    assert tried_again(store, record, monkeypatch, lambda count: None).unpulled == "the user gave them up"
    assert recorded_machine.calls(there) == ["down"]


def test_p07_what_did_not_come_home_is_known_though_the_record_could_not_be_written(
    store: RecordStore, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = left_alone(store, there, lease_seconds=LEASE)
    for trouble in ("pull-fails", "unproven"):
        (there / trouble).touch()

    def resting(count: int) -> None:
        store.update(record.id, state="down", unpulled=None)  # what it said before that try's end
        (there / "unproven").unlink()

    assert "rsync" in str(tried_again(store, record, monkeypatch, resting).unpulled)
    assert recorded_machine.calls(there) == ["pull", "down"] * 2


def test_p07_what_a_last_copy_raises_is_raised(store: RecordStore, there: Path) -> None:
    record = left_alone(store, there)

    def copy(stopped: Stopped) -> str | None:
        raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space left"):
        last_copy.copy_results(record, store.folder(record.id), copy, never)


def test_p07_folders_that_are_renamed_meanwhile_end_no_copy(tmp_path: Path) -> None:
    """What has come whole is renamed into its place, and SkyPilot's own home changes as well."""
    over = threading.Event()
    (tmp_path / "stays").write_bytes(b"12345")

    def rename() -> None:
        for number in range(1000000):
            if over.is_set():
                return
            (tmp_path / "a" / str(number) / "deep").mkdir(parents=True)
            (tmp_path / "a").rename(tmp_path / "b")
            shutil.rmtree(tmp_path / "b")

    thread = threading.Thread(target=rename)
    thread.start()
    try:
        assert {last_copy._bytes(tmp_path) for _ in range(500)} == {5}
    finally:
        over.set()
        thread.join()
