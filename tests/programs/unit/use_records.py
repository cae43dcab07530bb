"""Another process at the records of a home: `use_records.py HOME ACTION [WORD…]`, one of ACTIONS."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from launcher.base.home import Home
from launcher.records.records import LiveNameError, RecordStore


def create(store: RecordStore, name: str | None = None) -> None:
    """One more run: its id, or the id of the one that has the name."""
    try:
        print(store.create(name=name).id)
    except LiveNameError as error:
        print("refused", error.record.id)


def create_and_die(store: RecordStore, name: str, *command: str) -> None:
    store.create(name=name, command=command)
    os.kill(os.getpid(), signal.SIGKILL)


def count(store: RecordStore, run_id: str, field: str) -> None:
    """Write 0 to 39 into a field, one after the other."""
    for number in range(40):
        store.update(run_id, **{field: str(number)})


def write_for_ever(store: RecordStore, run_id: str) -> None:
    """Write a long record again and again."""
    print("going", flush=True)
    while True:
        store.update(run_id, details={"filling": "x" * 20000})


ACTIONS: dict[str, Callable[..., None]] = {
    "create": create,
    "create-and-die": create_and_die,
    "count": count,
    "write-for-ever": write_for_ever,
}

if __name__ == "__main__":
    home = Path(sys.argv[1])
    ACTIONS[sys.argv[2]](RecordStore(Home(home, home, home)), *sys.argv[3:])
