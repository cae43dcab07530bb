"""Lives a run whose home, a small file system, fills up while it starts: `live_on_small_disk.py FOLDER`.

Its machine costs something, and takes its disk along. At the end there is room again, and the guardian, which
launch could not let go, writes what launch could not. Says as JSON how it was.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from tests.support.lived import Lives
from tests.support.waiting import wait_until


def fill(place: Path) -> None:
    """Until there is no room for one more byte, again where some has come free."""
    with place.open("ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return


def main(small: Path) -> None:
    filling = small / "filling"
    live = Lives(Path(tempfile.mkdtemp(prefix="elsewhere-")))
    live.home = type(live.home)(small / "home", small / "config", small / "cache")
    live.store = type(live.store)(live.home)
    lived = live(acts={"serve": lambda: fill(filling)}, price=12.0)
    said = {
        "code": lived.code,
        "calls": lived.machine.calls,
        "live_when_full": lived.record.live,
        "full": filling.exists() and filling.stat().st_size > 0,
        "stderr": lived.stderr,
    }
    filling.unlink()
    live.die()
    wait_until(lambda: not live.store.load(lived.record.id).live, what="the guardian has written it")
    record = live.store.load(lived.record.id)
    print(json.dumps(said | {"state": record.state, "ended_by": record.ended_by}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
