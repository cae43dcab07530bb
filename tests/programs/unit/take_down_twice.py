"""Finds a run's machine by the run's record, ends it twice, and says whether that is proven."""

from __future__ import annotations

import sys
from pathlib import Path

from launcher.backends.machine_from_record import from_record
from launcher.records.records import RecordStore

if __name__ == "__main__":
    path = Path(sys.argv[1])
    machine = from_record(RecordStore.of_record(path).load(path.parent.name))
    machine.down()
    machine.down()
    print(machine.proof().verified)
