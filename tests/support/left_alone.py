"""A rented run that its launch and its guardian have left alone, for whatever ends it all the same.

    record = left_alone(store, there)       (named dev; `there` is its machine's own folder)
    done = typed("down", "dev")

Neighbours: `recorded_machine.py` is the machine; `tests/programs/unit/end_run.py` is another who ends it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from launcher.backends import machine_from_record
from launcher.base import clock
from launcher.base.home import Home
from launcher.base.processes import ProcessId
from launcher.records.records import RecordStore, RunRecord
from launcher.results import background_copy
from launcher.teardown import leftovers, take_down
from tests.support import recorded_machine
from tests.support.environment import REPOSITORY
from tests.support.typed import Typed

PRICE = 12.0


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Typed:
    monkeypatch.setattr(leftovers, "socket_parents", lambda: [])
    monkeypatch.setitem(
        machine_from_record._KINDS,
        recorded_machine.KIND,
        ("tests.support.recorded_machine", "RecordedMachine"),
    )
    monkeypatch.setattr(take_down, "TRIES_SECONDS", 0.5)
    monkeypatch.setattr(background_copy, "_RETRY_SECONDS", 0.05)
    return Typed(tmp_path / "project", tmp_path / "home")


@pytest.fixture
def store(typed: Typed) -> RecordStore:
    return RecordStore(Home.find({"LAUNCH_HOME": str(typed.home)}))


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """The machine's own folder."""
    return tmp_path / "there"


def left_alone(store: RecordStore, there: Path, ago: float = 0.0, **plan: float) -> RunRecord:
    """A rented run named dev, at work, whose launch and guardian are gone; it began so long ago."""
    record = store.create(name="dev", details={"plan": plan})
    gone = ProcessId(2**22, "long ago")
    machine = recorded_machine.describe(there, PRICE)
    changes = {"state": "work", "launch": gone, "guardian": gone, "url": "http://127.0.0.1:1"}
    begun = {"begun": time.time() - ago, "begun_boot": clock.boot_seconds() - ago}
    return store.update(record.id, machine=machine, **begun, **changes)


def environ() -> dict[str, str]:
    """Of a process beside this one, which has this tree's code."""
    return {**os.environ, "PYTHONPATH": str(REPOSITORY)}
