"""One case of the kill matrix: a rented run on the test cloud, what strikes it when, and what became of it.

Neighbours: `test_matrix.py` says what must have become of it, `matrix_log.py` writes it down. The runtime has
no engine (`small_runtime.py`), which is the one thing that is not as shipped.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import signal
import sqlite3
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from launcher.base import failpoints
from tests.cloud.launched import RENTED, Launched, left
from tests.cloud.rig import REPOSITORY, Rig
from tests.support.waiting import SOONEST_SECONDS, wait_until

# The promise (G1).
GONE_SECONDS = 60.0
# The proof: the provider is asked again, SkyPilot's server ends, the record is written.
VERIFIED_SECONDS = 300.0
UP_SECONDS = 1200.0

# Nothing to do; a program that asks in every way and trains all the time, or so many steps; real training.
IDLE = ("sleep", "86399")
ASKING = (sys.executable, "-m", "tests.support.small_program")
TRAINING = ("python", "examples/quickstart.py", "--steps", "400")
PROGRAMS = (IDLE[1], ASKING[2], TRAINING[1])
# The heart's own requests come first: this one is the program's.
_COUNTS = {"relay.read": 5, "relay.forwarded": 5, "relay.answered": 5}
_LATE = ("cli.pulling", "cli.pulled", "cloud.downing", "cloud.downed", "cli.downed")
# How an end begins that launch itself lives to see, and what it ends with.
_SAID = {"term": "TERM:", "int": "Ctrl-C:", "hup": "the terminal closed:", "raise": "launch has a bug"}
_CODES = {"kill9": -9, "segv": -11, "term": 143, "int": 130, "hup": 129, "raise": 1}
_SIGNALS = {
    "kill9": signal.SIGKILL, "segv": signal.SIGSEGV, "term": signal.SIGTERM, "hup": signal.SIGHUP,
    "int": signal.SIGINT,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """`where`: a failpoint, or an instant of the cloud's at which `how` is done from outside."""

    where: str
    how: str

    @property
    def name(self) -> str:
        return f"{self.where}:{self.how}"

    @property
    def program(self) -> tuple[str, ...]:
        if self.where.startswith("relay.") and self.where != "relay.opened":
            return (*ASKING, "0")
        return ("true",) if self.where in _LATE else IDLE


@dataclass(frozen=True)
class Ended:
    """What became of it; seconds from the strike."""

    code: int
    machines_made: int
    gone_seconds: float
    verified_seconds: float
    record: dict[str, Any]


# ------------------------------------------------------------------ instants of the cloud's


def _machine_is_made(rig: Rig, launched: Launched) -> bool:
    """The provider has accepted, nobody else knows."""
    return bool(rig.witness("run"))


def _launch_is_taken(rig: Rig, launched: Launched) -> bool:
    """SkyPilot has the request, and no cluster in its books. A down needs no server, so that has none."""
    home = rig.folder / "launch" / "runs"
    for database in home.glob("*/skypilot/.sky/api_server/requests.db"):
        with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(database)) as books:
            return bool(books.execute("SELECT 1 FROM requests WHERE name = 'sky.launch'").fetchone())
    return False


REACHED: dict[str, Callable[[Rig, Launched], bool]] = {
    "launch taken": _launch_is_taken,
    "machine made": _machine_is_made,
}

# Passed only by a run that goes on on a new machine: of a rented one `test_matrix.py` has a test of its own.
_OF_A_NEW_MACHINE = ("cloud.seeding", "durable.seeding")

CASES = [
    *(Case(name, "kill9") for name in failpoints.NAMES if name not in _OF_A_NEW_MACHINE),
    *(Case(where, "kill9") for where in REACHED),
    *(Case("machine made", how) for how in ("term", "int", "hup", "segv")),
    Case("cloud.launched", "raise"),
    *(Case("cli.started", how) for how in ("term", "int", "hup", "segv", "raise")),
]


def begin(rig: Rig, case: Case, *words: str) -> Launched:
    """`launch` with the failpoint armed, where it is one."""
    armed = {}
    if case.where not in REACHED:
        # In a file, it happens once: to launch, and not to its guardian as well.
        armed[failpoints.VARIABLE] = f"file:{rig.folder / 'failpoint'}"
        (rig.folder / "failpoint").write_text(f"{case.where}@{_COUNTS.get(case.where, 1)}:{case.how}")
    return Launched(rig, [*RENTED, *words, "--", *case.program], PYTHONPATH=small_code(rig), **armed)


def small_code(rig: Rig) -> str:
    """A folder from which launch takes, and pushes, a runtime without an engine."""
    folder = rig.folder / "small"
    if not folder.exists():
        shutil.copytree(
            REPOSITORY / "runtime", folder / "runtime", ignore=shutil.ignore_patterns("__pycache__")
        )
        shutil.copy(REPOSITORY / "tests" / "support" / "small_runtime.py", folder / "runtime" / "__main__.py")
    return str(folder)


def strike(rig: Rig, launched: Launched, case: Case) -> float:
    """Let it happen; when it did."""
    over = launched.process.poll

    def so_far() -> str:
        return f"{case.name}\n{launched.text}"

    if case.where in REACHED:
        reached = REACHED[case.where]
        wait_until(
            lambda: reached(rig, launched) or over() is not None,
            UP_SECONDS,
            so_far,
            rarest_seconds=SOONEST_SECONDS,
        )
        assert over() is None, launched.text
        launched.send(_SIGNALS[case.how])
        return time.time()
    said = _SAID.get(case.how)
    wait_until(
        lambda: over() is not None or (said is not None and said in launched.text),
        UP_SECONDS,
        so_far,
    )
    return time.time()


def outcome(rig: Rig, launched: Launched, struck_at: float, gone_seconds: float = GONE_SECONDS) -> Ended:
    """Wait for the promise: no machine, a record that says so, no process.

    Where the machine itself took over half a minute to be made, the computer is busy: ending it is the same
    kind of work, and has as much longer.
    """
    made_after = max((one["time"] - launched.begun_at for one in rig.witness("run")[:1]), default=0.0)
    more_seconds = max(0.0, 2 * made_after - GONE_SECONDS)
    gone_seconds += more_seconds
    verified_seconds = VERIFIED_SECONDS + 2 * more_seconds
    told = functools.partial(_told, rig, launched)
    try:
        wait_until(
            lambda: not rig.alive(), gone_seconds - (time.time() - struck_at), "the machine to be gone"
        )
        verified = verified_seconds - (time.time() - struck_at)
        wait_until(lambda: _at_rest(launched), verified, "the proof in the record")
        verified_at = time.time()
        code = launched.wait(600)
        wait_until(lambda: not left(rig, *PROGRAMS), 600, "the end of every process")
    except AssertionError as error:
        raise AssertionError(f"{error}\n{told()}") from None
    assert not rig.alive(), told()
    gone_at = max([struck_at, *(one["time"] for one in rig.witness("terminate"))])
    made = len(rig.witness("run"))
    return Ended(code, made, gone_at - struck_at, verified_at - struck_at, launched.record)


def _at_rest(launched: Launched) -> bool:
    """Down and proven; or, where nothing at all had been started, recorded and no more."""
    record = launched.record
    return record["state"] == "verified" or (record["state"] == "created" and not record["machine"])


def _told(rig: Rig, launched: Launched) -> str:
    log = launched.run / "guardian.log"
    said = log.read_text() if log.exists() else "no guardian"
    processes = "\n".join(left(rig, *PROGRAMS))
    return f"{launched.text}\n{said}\n{rig.witness()}\n{launched.record}\n{processes}"


def check(case: Case, ended: Ended) -> None:
    """What the promise says of a run that was struck so."""
    assert ended.code == _CODES[case.how]
    if case.where == "cli.recorded":
        assert ended.record["state"] == "created"
        return
    assert ended.record["state"] == "verified" and ended.record["proof"]["verified"]
    assert ended.record["ended_by"] == ("guardian" if ended.code < 0 else "launch")
