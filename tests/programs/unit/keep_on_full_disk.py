"""Runs the keeper on a small file system that fills up: `keep_on_full_disk.py FOLDER`.

The timer's table is as skylet makes it. Says as JSON, of two lives, how often the timer was reset after the
disk was full, what staging for the copy home said then, and how the keeper recorded the end.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
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


class AnsweringUnlessHeld(autodown.RuntimeLiveness):
    """Answers, but for the time in which the test fills the disk: a reset in progress has files of its own
    there, and their room comes back when it ends."""

    def __init__(self, state_dir: Path, socket_dir: Path) -> None:
        super().__init__(state_dir, socket_dir)
        self._held = False
        self._refusals = 0

    def problem(self) -> str | None:
        if not self._held:
            return None
        self._refusals += 1
        return "the disk is being filled"

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """No reset begins or goes on meanwhile."""
        self._refusals, self._held = 0, True
        # The second one: by then the keeper has written down what it made of the first.
        wait_until(lambda: self._refusals >= 2)
        try:
            yield
        finally:
            self._held = False


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


def _stage(folder: Path) -> bool:
    """Whether staging exited with 0 and said that the checkpoint may be fetched."""
    script = Path(remote_staging.__file__).read_text()
    request = json.dumps({"newest": 1, "journals": {}})
    words = [sys.executable, "-", request]
    done = subprocess.run(words, input=script, text=True, cwd=folder, capture_output=True, check=False)
    return not done.returncode and "checkpoints/step-000001/adapter" in done.stdout


def _life(folder: Path, stage: Callable[[Path], bool] | None) -> dict[str, Any]:
    """One keeper's. What filled the disk takes the room that was given back, too."""
    database = folder / "skylet_config.db"
    seen: dict[str, Any] = {"resets": 0, "staged": None}
    (folder / "logs").mkdir(parents=True)
    (folder / "checkpoints" / "step-000001").mkdir(parents=True)
    (folder / "checkpoints" / "step-000001" / "adapter").write_text("weights")
    (folder / "checkpoints" / "pinned.json").write_text("[]")
    _make_table(database)
    ballast = Ballast(folder, _PIECES, _PIECE_BYTES)
    liveness = AnsweringUnlessHeld(folder, folder)
    timer = AutostopTimer(database, liveness, arm=lambda: None, make_room=ballast.release)
    keeper = Keeper(folder, RunLimits(600.0, None), ["sleep", "600"], timer=timer, ballast=ballast)

    def reset_on_full_disk() -> None:
        with liveness.held():
            _fill(folder)
            full_at = time.time()
        wait_until(lambda: _reset_at(database) > full_at, _BOUND_SECONDS)
        seen["resets"] += 1

    def drive() -> None:
        try:
            wait_until(lambda: _reset_at(database) > 2 and len(list(folder.glob("ballast/*"))) == _PIECES)
            reset_on_full_disk()
            reset_on_full_disk()
            with liveness.held():
                _fill(folder)
                seen["staged"] = None if stage is None else stage(folder)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=drive, daemon=True).start()
    code = keeper.run(b"token")
    record = json.loads((folder / "keeper.json").read_text())
    shutil.rmtree(folder)
    return {**seen, "code": code, "end": [record["state"], record["reason"]]}


def _lives(small: Path, stager: Connection) -> None:
    """Both, in a process of their own."""

    def stage(folder: Path) -> bool:
        stager.send(folder)
        return bool(stager.recv())

    autodown.RENEW_EVERY_SECONDS = 0.1
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # the keeper waits for it, in its own thread
    print(json.dumps([_life(small / "ended", None), _life(small / "copied", stage)]), flush=True)


def main(small: Path) -> int:
    """Staging is this process's child, as on a machine it is sshd's: a keeper kills the children of its own
    that it does not know."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    lives = context.Process(target=_lives, args=(small, theirs))
    lives.start()
    theirs.close()
    with contextlib.suppress(EOFError):
        while True:
            ours.send(_stage(ours.recv()))
    lives.join()
    return lives.exitcode or 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
