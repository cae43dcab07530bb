"""A run that is ended without its launch: what a computer or a library raises is said and skips nothing."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from launcher.base.processes import ProcessId
from launcher.records.records import RecordStore, RunRecord
from launcher.teardown import take_down
from tests.support import recorded_machine
from tests.support.left_alone import left_alone, store, there, typed
from tests.support.typed import Typed

__all__ = ["store", "there", "typed"]

pytestmark = pytest.mark.process


@pytest.mark.parametrize("trouble", [None, "pull-fails"])
def test_g27_results_are_given_up_on_a_full_disk_too(
    typed: Typed, store: RecordStore, there: Path, trouble: str | None
) -> None:
    """What is to become the record is the device on which there is never any room."""
    record = left_alone(store, there)
    if trouble is not None:
        (there / trouble).touch()
    (store.folder(record.id) / ".record.json.tmp").symlink_to("/dev/full")
    done = typed("down", "dev", "--give-up-results")
    assert recorded_machine.calls(there) == ["pull", "down"], done.stderr
    assert done.returncode == 3, done.stderr
    assert "dev is down, but its record cannot be written" in done.stderr


def test_g27_what_this_computer_refuses_a_verb_is_3_and_no_bug(
    typed: Typed, store: RecordStore, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_alone(store, there)

    def refuse(*words: object, **more: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "somewhere")

    monkeypatch.setattr(take_down, "take_down", refuse)
    done = typed("down", "dev")
    assert done.returncode == 3, done.stderr
    assert "No space left on device: somewhere" in done.stderr and "bug" not in done.stderr


def test_g27_what_one_find_raises_keeps_gc_from_no_other(
    typed: Typed, store: RecordStore, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.update(store.create(name="first").id, state="work", launch=ProcessId(2**22, "long ago"))
    left_alone(store, there)
    real = take_down.take_down

    def refuse_the_first(store: RecordStore, record: RunRecord, *words: Any, **more: Any) -> RunRecord:
        if record.name == "first":
            raise RuntimeError("a library's own")
        return real(store, record, *words, **more)

    monkeypatch.setattr(take_down, "take_down", refuse_the_first)
    done = typed("gc", "--yes")
    assert done.returncode == 1 and "a library's own" in done.stdout + done.stderr
    assert recorded_machine.calls(there) == ["pull", "down"]
