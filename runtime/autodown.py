"""Resets the rented machine's own timer, SkyPilot's skylet, which ends the machine unless it is reset.

    python3 -m runtime.autodown        resets it once (`launch` runs this while it waits for a set-up)

Skylet looks once a minute whether the machine was active within its idle minutes, by a time in a SQLite table
of its own; writing the present time there is all it takes (27 ms, no SkyPilot, no API server). It was armed
before anything else and counts only these writes: if they stop, for any reason, the machine ends. Neighbours:
`keeper.py` writes while the run may go on. Standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import os
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

DATABASE = "~/.sky/skylet_config.db"
# The least that can be armed is a minute: three of four may fail.
RENEW_EVERY_SECONDS = 15.0
_BUSY_SECONDS = 1.0
_ANSWER_SECONDS = 2.0
# The supervisor writes its file every 5 s (supervision.py).
_HEARTBEAT_SECONDS = 30.0
# A gateway that never answered is starting, for so long; models load behind it.
_START_SECONDS = 180.0
_LAST_ACTIVE = "autostop_last_active_time"
# SQLITE_IOERR, SQLITE_FULL, SQLITE_CANTOPEN: before Python 3.11 the module has no names for them.
_DISK_FULL = frozenset({10, 13, 14})
# 1.8 s where the machine has nothing else to do. Less than the least that can be armed: nothing is set back
# meanwhile.
_ARM_SECONDS = 40.0
# In the Python that SkyPilot brings to each of its machines.
ARM_COMMAND = (
    "~/skypilot-runtime/bin/python",
    "-c",
    "from sky.skylet import autostop_lib as a; c = a.get_autostop_config(); "
    "a.set_autostop(c.autostop_idle_minutes, c.backend, c.wait_for, c.down)",
)


def renew(database: Path) -> None:
    """Reset the timer. Raises OSError, sqlite3.Error if there is none."""
    if not database.is_file():  # connecting would create one that nothing reads
        raise FileNotFoundError(f"no {database}: nothing of SkyPilot's is armed here")
    with contextlib.closing(sqlite3.connect(database, timeout=_BUSY_SECONDS)) as connection, connection:
        changed = connection.execute(
            "UPDATE config SET value = ? WHERE key = ?", (str(time.time()), _LAST_ACTIVE)
        ).rowcount
    if changed != 1:
        raise sqlite3.DataError(f"{database} has no {_LAST_ACTIVE}")


def booted_at() -> int:
    """The second this machine started, by its clock: another one after a restart, or a clock that was set."""
    with open("/proc/stat") as stat:
        return next(int(line.split()[1]) for line in stat if line.startswith("btime "))


def rearm(command: Sequence[str] = ARM_COMMAND) -> None:
    """Have SkyPilot arm the timer again. SkyPilot ignores a timer of another boot without a word.

    Raises OSError, subprocess.SubprocessError.
    """
    words = [os.path.expanduser(word) for word in command]
    subprocess.run(words, check=True, capture_output=True, timeout=_ARM_SECONDS)


def _is_disk_full(error: sqlite3.Error) -> bool:
    """Whether it may be that: SQLite names the step that failed, such as opening its journal."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in _DISK_FULL


class RuntimeLiveness:
    """Tells whether the runtime of a folder answers: its supervisor is alive, its gateway is healthy."""

    def __init__(self, state_dir: Path, socket_dir: Path) -> None:
        self._beat = state_dir / "supervisor.json"
        self._gateway = socket_dir / "gateway.sock"
        self._begun_at = self._beaten_at = time.monotonic()
        self._seen: int | None = None
        self._answered = False

    def problem(self) -> str | None:
        """The reason the timer must not be reset; None if it may be. Takes 2 s at most."""
        now = time.monotonic()
        with contextlib.suppress(FileNotFoundError):
            stamp = self._beat.stat().st_mtime_ns
            if stamp != self._seen:
                self._seen, self._beaten_at = stamp, now
        if now - self._beaten_at > _HEARTBEAT_SECONDS:
            return f"the supervisor has been silent for {now - self._beaten_at:.0f} s"
        if self._ask():
            self._answered = True
            return None
        if not self._answered and now - self._begun_at < _START_SECONDS:
            return None
        return "the gateway does not answer"

    def _ask(self) -> bool:
        connection = http.client.HTTPConnection("localhost")
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as gateway_socket:
                gateway_socket.settimeout(_ANSWER_SECONDS)
                gateway_socket.connect(str(self._gateway))
                connection.sock = gateway_socket
                connection.request("GET", "/healthz")
                return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False


class AutostopTimer:
    """The keeper's handle on the machine's timer. `make_room`: frees some of a full disk; False if none."""

    def __init__(
        self,
        database: Path,
        answering: RuntimeLiveness,
        arm: Callable[[], None] = rearm,
        booted: Callable[[], int] = booted_at,
        make_room: Callable[[], bool] = lambda: False,
    ) -> None:
        self._arm = arm
        self._make_room = make_room
        self._booted = booted
        # Armed when the machine came up; its clock may have been set since then.
        self._armed_for: int | None = None
        self._database = database
        self._answering = answering
        self._next_at = 0.0
        self._told: str | None = None

    def tick(self) -> str | None:
        """Reset it if that is due and the runtime answers; a message if there is news."""
        if time.monotonic() < self._next_at:
            return None
        self._next_at = time.monotonic() + RENEW_EVERY_SECONDS
        trouble = self._answering.problem()
        unarmed = ""
        if trouble is None:
            try:  # first: to arm may take long
                self._renew()
            except (OSError, sqlite3.Error) as error:
                trouble = str(error)
            unarmed = self._keep_armed()
        message = (
            f"the machine's timer runs: {trouble}" if trouble else f"the machine's timer is reset{unarmed}"
        )
        if message == self._told:
            return None
        self._told = message
        return message

    def _renew(self) -> None:
        """Reset it, with room made for that on a full disk."""
        while True:
            try:
                renew(self._database)
            except sqlite3.Error as error:
                if not _is_disk_full(error) or not self._make_room():
                    raise
            else:
                return

    def _keep_armed(self) -> str:
        """Arm it again if the machine's clock or boot changed; a message if that fails."""
        booted = self._booted()
        if booted == self._armed_for:
            return ""
        try:
            self._arm()
        except (OSError, subprocess.SubprocessError) as error:
            return f", but could not be armed for this boot: {error}"
        self._armed_for = booted
        return ""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="runtime.autodown", description="Resets the machine's timer once.")
    parser.add_argument("--database", default=DATABASE)
    database = Path(os.path.expanduser(parser.parse_args(arguments).database))
    try:
        renew(database)
    except (OSError, sqlite3.Error) as error:
        print(error, file=sys.stderr)  # noqa: T201 - a command's stderr
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
