"""The latest time at which an unattended rented machine ended itself: it costs nothing after it.

Its runtime waits for its lease, then the machine for its idle minutes. Neighbours: `take_down.py` asks before
it connects to the machine; `heartbeat.py` has the launch's sign of life, `remote_folder.py` copies the
machine's status, and each such copy renews the lease, whichever process makes it. Knows nothing of providers.
"""

from __future__ import annotations

import time
from pathlib import Path

from launcher.records import heartbeat
from launcher.records.records import RunRecord
from launcher.types.machine import TIMER_SECONDS

# The copy of the run's folder on its machine, below the run's folder here.
_MACHINE_FOLDER = "machine"


def latest_end(record: RunRecord) -> float | None:
    """By `record.now`'s clock; None if unknown: for a run that was never ready, or has no sign of life."""
    lease = (record.details.get("plan") or {}).get("lease_seconds")
    idle = record.machine.get("idle_minutes")
    age = heartbeat.age_seconds(record.folder)
    known = record.rented and record.may_have_results
    if not known or lease is None or idle is None or age is None:
        return None
    heard = max(record.life.begun, time.time() - age, _last_seen_at(record.folder / _MACHINE_FOLDER))
    return heard + lease + 60 * idle + TIMER_SECONDS


def _last_seen_at(folder: Path) -> float:
    """The time of the machine's last status; 0 if there is none."""
    try:
        return max((path.lstat().st_mtime for path in folder.iterdir() if path.is_file()), default=0.0)
    except OSError:
        return 0.0
