"""Runs the keeper on a small file system that fills up: `keep_on_full_disk.py FOLDER`.

The timer's table is as skylet makes it. Says as JSON, of two lives, how often the timer was reset after the
disk was full, what staging for the copy home said then, and how the keeper recorded the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from launcher.backends.ssh import remote_staging
from runtime import autodown
from runtime.autodown import AutostopTimer
from runtime.ballast import Ballast
from runtime.keeper import Keeper, RunLimits
from tests.support.waiting import wait_until

_PIECES, _PIECE_BYTES = 4, 48 << 10
# A keeper that cannot reset the timer on a full disk never will.
_BOUND_SECONDS = 30.0


class AlwaysAnswering(autodown.RuntimeLiveness):
    def problem(self) -> str | None:
        return None


def _reset_at(database: Path) -> float:
    with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        return float(connection.execute("SELECT value FROM config").fetchone()[0])


def _make_table(database: Path) -> None:
    with contextlib.closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("CREATE TABLE config (key TEXT PRIMARY KEY, value TEXT)")
        connection.execute("INSERT INTO config VALUES ('autostop_last_active_time', '1.5')")


def _fill(folder: Path) -> None:
    with contextlib.suppress(OSError), open(folder / "filling", "ab", buffering=0) as file:
        while True:
            file.write(bytes(1024))


def _stage(folder: Path) -> int:
    script = Path(remote_staging.__file__).read_text()
    request = json.dumps({"newest": 1, "journals": {}})
    words = [sys.executable, "-", request]
    done = subprocess.run(words, input=script, text=True, cwd=folder, capture_output=True, check=False)
    staged = (folder / ".home" / "checkpoints" / "step-000001" / "adapter").exists()
    return done.returncode if staged else -1


def _life(folder: Path, stages: bool) -> dict[str, Any]:
    """One keeper's. What filled the disk takes the room that was given back, too."""
    database = folder / "skylet_config.db"
    seen: dict[str, Any] = {"resets": 0, "staged": None}
    (folder / "logs").mkdir(parents=True)
    (folder / "checkpoints" / "step-000001").mkdir(parents=True)
    (folder / "checkpoints" / "step-000001" / "adapter").write_text("weights")
    (folder / "checkpoints" / "pinned.json").write_text("[]")
    _make_table(database)
    ballast = Ballast(folder, _PIECES, _PIECE_BYTES)
    liveness = AlwaysAnswering(folder, folder)
    timer = AutostopTimer(database, liveness, arm=lambda: None, make_room=ballast.release)
    keeper = Keeper(folder, RunLimits(600.0, None), ["sleep", "600"], timer=timer, ballast=ballast)

    def reset_on_full_disk() -> None:
        _fill(folder)
        full_at = time.time()
        wait_until(lambda: _reset_at(database) > full_at, _BOUND_SECONDS)
        seen["resets"] += 1

    def drive() -> None:
        try:
            wait_until(lambda: _reset_at(database) > 2 and len(list(folder.glob("ballast/*"))) == _PIECES)
            reset_on_full_disk()
            reset_on_full_disk()
            _fill(folder)
            seen["staged"] = _stage(folder) if stages else None
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=drive, daemon=True).start()
    code = keeper.run(b"token")
    record = json.loads((folder / "keeper.json").read_text())
    shutil.rmtree(folder)
    return {**seen, "code": code, "end": [record["state"], record["reason"]]}


def main(small: Path) -> None:
    autodown.RENEW_EVERY_SECONDS = 0.1
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # the keeper waits for it, in its own thread
    print(json.dumps([_life(small / "ended", False), _life(small / "copied", True)]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
