"""A rented run killed at each of its instants, in each way: its machine is gone within a minute, with proof.

    pytest -m matrix tests/cloud/test_matrix.py          40 min; goes on where it was broken off
    python -m tests.cloud.test_matrix                    its log as a table

Each case is a whole `launch --gpus` on the test cloud; its runtime has no engine (`small_runtime.py`), which
is the one thing that is not as shipped. One that has passed leaves a line in the log (`SLIPWAY_MATRIX_LOG`,
else in the user's cache) and is not run again for the same code. What CI runs of it is at the end, with what
SkyPilot's own minutes make long.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs
import pytest

from launcher import checkpoints, durable, failpoints
from tests.cloud.launched import OURS, RENTED, SKYPILOT, Launched, left, running
from tests.cloud.rig import REPOSITORY, Rig
from tests.support.waiting import SOONEST_SECONDS, wait_until

pytestmark = pytest.mark.slow

LOG_VARIABLE = "SLIPWAY_MATRIX_LOG"
# The promise (G1).
GONE_SECONDS = 60.0
# The proof: the provider is asked again, SkyPilot's server ends, the record is written.
VERIFIED_SECONDS = 120.0
_UP_SECONDS = 400.0

# Nothing to do; a program that asks in every way and trains all the time, or so many steps; real training.
_IDLE = ("sleep", "86399")
_ASKING = (sys.executable, "-m", "tests.support.small_program")
_TRAINING = ("python", "examples/quickstart.py", "--steps", "400")
_PROGRAMS = (_IDLE[1], _ASKING[2], _TRAINING[1])
# The heart's own requests come first: this one is the program's.
_COUNTS = {"relay.read": 5, "relay.forwarded": 5, "relay.answered": 5}
_LATE = ("down taken", "cli.pulling", "cli.pulled", "cloud.downing", "cloud.downed", "cli.downed")
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
            return (*_ASKING, "0")
        return ("true",) if self.where in _LATE else _IDLE


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


def _taken(name: str, rig: Rig, launched: Launched) -> bool:
    """SkyPilot has the request: of a launch, and no cluster in its books; of a down, and a cluster still."""
    home = rig.folder / "launch" / "runs"
    for database in home.glob("*/skypilot/.sky/api_server/requests.db"):
        with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(database)) as books:
            return bool(books.execute("SELECT 1 FROM requests WHERE name = ?", (name,)).fetchone())
    return False


_REACHED: dict[str, Callable[[Rig, Launched], bool]] = {
    "launch taken": functools.partial(_taken, "sky.launch"),
    "machine made": _machine_is_made,
    "down taken": functools.partial(_taken, "sky.down"),
}

CASES = [
    *(Case(name, "kill9") for name in failpoints.NAMES if name != "durable.seeding"),
    *(Case(where, "kill9") for where in _REACHED),
    *(Case("machine made", how) for how in ("term", "int", "hup", "segv")),
    Case("cloud.launched", "raise"),
    *(Case("cli.started", how) for how in ("term", "int", "hup", "segv", "raise")),
]


# ------------------------------------------------------------------ one case


def _launch(rig: Rig, case: Case, *words: str) -> Launched:
    armed = {}
    if case.where not in _REACHED:
        # In a file, it happens once: to launch, and not to its guardian as well.
        armed[failpoints.VARIABLE] = f"file:{rig.folder / 'failpoint'}"
        (rig.folder / "failpoint").write_text(f"{case.where}@{_COUNTS.get(case.where, 1)}:{case.how}")
    return Launched(rig, [*RENTED, *words, "--", *case.program], PYTHONPATH=_small(rig), **armed)


def _small(rig: Rig) -> str:
    """A folder from which launch takes, and pushes, a runtime without an engine."""
    folder = rig.folder / "small"
    if not folder.exists():
        shutil.copytree(
            REPOSITORY / "runtime", folder / "runtime", ignore=shutil.ignore_patterns("__pycache__")
        )
        shutil.copy(REPOSITORY / "tests" / "support" / "small_runtime.py", folder / "runtime" / "__main__.py")
    return str(folder)


def _strike(rig: Rig, launched: Launched, case: Case) -> float:
    """Let it happen; when it did."""
    over = launched.process.poll

    def so_far() -> str:
        return f"{case.name}\n{launched.text}"

    if case.where in _REACHED:
        reached = _REACHED[case.where]
        wait_until(
            lambda: reached(rig, launched) or over() is not None,
            _UP_SECONDS,
            so_far,
            rarest_seconds=SOONEST_SECONDS,
        )
        assert over() is None, launched.text
        launched.send(_SIGNALS[case.how])
        return time.time()
    said = _SAID.get(case.how)
    wait_until(
        lambda: over() is not None or (said is not None and said in launched.text),
        _UP_SECONDS,
        so_far,
    )
    return time.time()


def _outcome(rig: Rig, launched: Launched, struck_at: float, gone_seconds: float = GONE_SECONDS) -> Ended:
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
        code = launched.wait(120)
        wait_until(lambda: not left(rig, *_PROGRAMS), 120, "the end of every process")
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
    processes = "\n".join(left(rig, *_PROGRAMS))
    return f"{launched.text}\n{said}\n{rig.witness()}\n{launched.record}\n{processes}"


def _check(case: Case, ended: Ended) -> None:
    assert ended.code == _CODES[case.how]
    if case.where == "cli.recorded":
        assert ended.record["state"] == "created"
        return
    assert ended.record["state"] == "verified" and ended.record["proof"]["verified"]
    assert ended.record["ended_by"] == ("guardian" if ended.code < 0 else "launch")


# ------------------------------------------------------------------ the log


@functools.cache
def _code() -> str:
    """Everything that runs on either side, as it is in this tree."""
    digest = hashlib.sha256()
    for half in ("launcher", "runtime", "sky"):
        for path in sorted((REPOSITORY / half).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(f"{path.relative_to(REPOSITORY)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _log() -> Path:
    named = os.environ.get(LOG_VARIABLE)
    cache = Path(platformdirs.user_cache_dir("slipway-tests", appauthor=False))
    return Path(named) if named else cache / "matrix.jsonl"


def _skip_when_seen(name: str) -> None:
    lines = _log().read_text().splitlines() if _log().exists() else []
    for seen in map(json.loads, lines):
        if (seen["case"], seen["code"]) == (name, _code()):
            pytest.skip(f"seen at {seen['date']}, commit {seen['commit']}")


def _note(name: str, ended: Ended, begun: float) -> None:
    commit = ["git", "rev-parse", "--short", "HEAD"]
    ended_by = ended.record["ended_by"] or "nobody: nothing was started"
    line = {
        "case": name,
        "happened": f"exit {ended.code}, ended by {ended_by}",
        "machines_made": ended.machines_made,
        "proof": (ended.record["proof"] or {}).get("detail"),
        "gone_seconds": round(ended.gone_seconds, 1),
        "verified_seconds": round(ended.verified_seconds, 1),
        "case_seconds": round(time.monotonic() - begun, 1),
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "commit": subprocess.run(commit, cwd=REPOSITORY, capture_output=True, text=True).stdout.strip(),
        "code": _code(),
    }
    _log().parent.mkdir(parents=True, exist_ok=True)
    with _log().open("a") as log:
        log.write(json.dumps(line) + "\n")
    print(line)


def _table() -> str:
    """The newest line of each case, as tests/bench/RESULTS.md has them."""
    newest = {line["case"]: line for line in map(json.loads, _log().read_text().splitlines())}
    rows = [
        f"| {one['case']} | {one['happened']} | {one['gone_seconds']} | {one['verified_seconds']} "
        f"| {one['case_seconds']} | {one['date'][11:16]} | {one['commit']} |"
        for one in newest.values()
    ]
    return "\n".join(rows)


# ------------------------------------------------------------------ the matrix


@pytest.mark.matrix
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "_"))
def test_g01_struck_at_this_instant_the_machine_is_gone_within_a_minute(
    case: Case, request: pytest.FixtureRequest
) -> None:
    _skip_when_seen(case.name)
    begun = time.monotonic()
    rig: Rig = request.getfixturevalue("runtime_rig")
    launched = _launch(rig, case)
    ended = _outcome(rig, launched, _strike(rig, launched, case))
    _check(case, ended)
    _note(case.name, ended, begun)


@pytest.mark.matrix
def test_g01_killed_while_a_new_machine_gets_the_durable_steps_it_is_gone_as_well(
    request: pytest.FixtureRequest,
) -> None:
    case = Case("durable.seeding", "kill9")
    _skip_when_seen(case.name)
    begun = time.monotonic()
    rig: Rig = request.getfixturevalue("runtime_rig")
    words = [*RENTED, "--name", "dev", "--", *_ASKING, "1"]
    first = Launched(rig, words, PYTHONPATH=_small(rig))
    assert first.wait(_UP_SECONDS) == 0, first.text
    launched = _launch(rig, case, "--resume", "dev")
    ended = _outcome(rig, launched, _strike(rig, launched, case))
    _check(case, ended)
    _note(case.name, ended, begun)


@pytest.mark.matrix
@pytest.mark.parametrize("where", ["machine made", "cli.started"])
def test_g01_with_skypilots_server_killed_at_the_same_moment_its_guardian_still_ends_it(
    where: str, request: pytest.FixtureRequest
) -> None:
    name = f"{where}:kill9, and all of SkyPilot's processes"
    _skip_when_seen(name)
    begun = time.monotonic()
    rig: Rig = request.getfixturevalue("runtime_rig")
    words = [*RENTED, "--lease", "1m", "--idle", "1m", "--", *_IDLE]
    launched = Launched(rig, words, PYTHONPATH=_small(rig))
    if where == "machine made":
        wait_until(lambda: rig.witness("run"), _UP_SECONDS, lambda: f"a machine\n{launched.text}")
    else:
        launched.wait_for("ready: http", _UP_SECONDS)
        wait_until(lambda: running(rig, _IDLE[1]), 120, lambda: f"the program\n{launched.text}")
    launched.send(signal.SIGKILL)
    _kill(running(rig, *SKYPILOT))
    ended = _outcome(rig, launched, time.time(), 60 + 60 + 90)
    _check(Case(where, "kill9"), ended)
    _note(name, ended, begun)


def _kill(processes: dict[int, str]) -> None:
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


# ------------------------------------------------------------------ in CI


def test_g01_killed_when_the_provider_has_just_made_the_machine_its_guardian_ends_it(rig: Rig) -> None:
    case = Case("machine made", "kill9")
    launched = _launch(rig, case)
    ended = _outcome(rig, launched, _strike(rig, launched, case))
    print(ended)
    _check(case, ended)


def test_g01_crashed_while_the_program_works_its_guardian_ends_both(runtime_rig: Rig) -> None:
    case = Case("cli.started", "segv")
    launched = _launch(runtime_rig, case)
    ended = _outcome(runtime_rig, launched, _strike(runtime_rig, launched, case))
    print(ended)
    _check(case, ended)


def test_g03_a_failed_setup_whose_launch_crashes_at_that_moment_leaves_nothing(rig: Rig) -> None:
    # There is no environment on the image, and no way out to make one: setting up fails, and this comes next.
    case = Case("cli.pulled", "segv")
    launched = _launch(rig, case)
    ended = _outcome(rig, launched, _strike(rig, launched, case))
    print(ended)
    assert "setup failed on the machine" in launched.text
    _check(case, ended)


# ------------------------------------------------------------------ SkyPilot's own minutes

_LEASE_SECONDS = 30
_SHORT = ("--lease", f"{_LEASE_SECONDS}s", "--idle", "1m")
# The promise (G4): lease + idle + 90 s.
_ENDS_ITSELF_SECONDS = _LEASE_SECONDS + 60 + 90


@pytest.mark.long
def test_g04_with_all_of_the_laptop_killed_the_step_is_saved_and_the_machine_ends_itself(
    runtime_rig: Rig,
) -> None:
    rig = runtime_rig
    launched = Launched(rig, [*RENTED, *_SHORT, "--", *_TRAINING])
    launched.wait_for("ready: http", _UP_SECONDS)
    home = launched.run / "results"
    wait_until(
        lambda: (durable.newest_step(home) or 0) >= 2, 60, lambda: f"two durable steps\n{launched.text}"
    )
    killed_at = _kill_the_laptop(rig)
    at_home = durable.newest_step(home) or 0
    there = _on_the_machine(rig, launched)
    wait_until(
        lambda: _reason(there) == "lease",
        _LEASE_SECONDS + 60,
        lambda: f"the lease's end, not {_reason(there)}",
    )
    newest = checkpoints.newest_whole(there / "checkpoints")
    assert newest is not None
    committed = checkpoints.step_of(newest)
    print(f"ended by its lease after {time.time() - killed_at:.0f} s, step {committed}, at home {at_home}")
    assert at_home <= committed <= at_home + 1
    assert rig.alive()
    _ends_itself(rig, killed_at)


@pytest.mark.long
def test_g03_a_failed_setup_whose_launch_and_guardian_are_killed_is_ended_by_its_autodown(rig: Rig) -> None:
    launched = _launch(rig, Case("cli.pulled", "stop"), *_SHORT)
    launched.wait_for("setup failed on the machine", _UP_SECONDS)
    killed_at = _kill_the_laptop(rig)
    assert rig.alive()
    _ends_itself(rig, killed_at)


def _kill_the_laptop(rig: Rig) -> float:
    """Everything of ours, of SkyPilot's, and the user's program, at once; when."""
    laptop = running(rig, *OURS, *_PROGRAMS)
    _kill(laptop)
    wait_until(lambda: not running(rig, *OURS, *_PROGRAMS), 10, "the laptop to be dead")
    return time.time()


def _ends_itself(rig: Rig, since: float) -> None:
    wait_until(lambda: not rig.alive(), _ENDS_ITSELF_SECONDS - (time.time() - since), "the machine's end")
    print(f"terminated {time.time() - since:.0f} s after, bound {_ENDS_ITSELF_SECONDS} s")


def _on_the_machine(rig: Rig, launched: Launched) -> Path:
    """The run's folder there, seen through the machine's first process."""
    (pid,) = (pid for pid, line in running(rig, "inside/reaper.py").items() if "python" in line)
    return Path("/proc", str(pid), "root", "home", "ubuntu", "slipway", launched.run.name)


def _reason(folder: Path) -> str | None:
    """Why the keeper ended; None while it runs."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads((folder / "keeper.json").read_text())["reason"]
    return None


if __name__ == "__main__":
    print(_table())
