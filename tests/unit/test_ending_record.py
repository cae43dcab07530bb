"""launcher/run/ending.py: a record that cannot be written, also on a full disk, skips nothing of the end.

The machine is in this process and costs something; record, guardian, relay, minder and signals are real.
What launch could not write its guardian finishes. Neighbours: `test_ending_full_disk.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.records.records import RecordStore
from tests.support.ends import KINDS, PRICE, UP, ended_well, soon
from tests.support.lived import Lives
from tests.support.small_disk import said_on_small_disk
from tests.support.waiting import wait_until

# `soon` is for every test here.
__all__ = ["soon"]

pytestmark = pytest.mark.slow


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
    said = said_on_small_disk("live_on_small_disk.py", small)
    assert said["full"], "the disk was full"
    assert said["calls"][-2:] == ["down", "proof"] and "pull" in said["calls"]
    assert said["code"] in (3, 8) and said["live_when_full"]
    assert said["ended_by"] == "guardian" and said["state"] == "verified"
    assert "Traceback" not in said["stderr"]
