"""Ends a run as somebody else would: `end_run.py HOME RUN WHO`; WHO is "guardian", or a word for a record.

Says what it notes, and at last how it went.
"""

from __future__ import annotations

import sys
from pathlib import Path

from launcher.base.errors import LaunchError
from launcher.base.home import Home
from launcher.records.records import RecordStore
from launcher.teardown import guardian, take_down
from tests.support import recorded_machine


def main(home: Path, run_id: str, who: str) -> int:
    recorded_machine.register()
    store = RecordStore(Home(home, home, home))
    if who == "guardian":
        return guardian.main([str(store.path(run_id))])
    try:
        record = take_down.take_down(store, store.load(run_id), who, lambda line: print(line, flush=True))
    except LaunchError as error:
        print(error.message, error.why, flush=True)
        return error.exit_code
    print(f"ended by {record.ended_by}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3]))
