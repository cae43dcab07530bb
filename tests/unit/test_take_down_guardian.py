"""A run whose launch is gone, ended by its guardian: not without its results, unless those were given up.

Also where its package was replaced in mid-run; not where another launch has taken the run up.
Neighbours: `test_guardian.py` has the ways in which a launcher goes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from launcher.base import process_inspection, processes
from launcher.base.home import Home
from launcher.base.processes import ProcessId
from launcher.records import heartbeat, teardown_lock
from launcher.records.records import RUN_VARIABLE, RecordStore, RunRecord
from launcher.teardown import guardian, last_copy
from launcher.types.machine import TIMER_SECONDS, Proof
from tests.support import recorded_machine
from tests.support.environment import PROGRAMS, REPOSITORY
from tests.support.left_alone import PRICE, environ, left_alone, store, there, typed
from tests.support.typed import Typed
from tests.support.waiting import wait_until

__all__ = ["store", "there", "typed"]

pytestmark = pytest.mark.process


@pytest.mark.slow
@pytest.mark.parametrize("trouble", [None, "pull-fails", "pull-hangs"])
def test_g29_the_guardian_tries_to_bring_them_home_and_then_ends_it(
    typed: Typed, store: RecordStore, there: Path, trouble: str | None
) -> None:
    record = left_alone(store, there)
    if trouble is not None:
        (there / trouble).touch()
    begun = time.monotonic()
    done = _guarded(store, record)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - begun < last_copy.STALL_SECONDS + 60
    ended = store.load(record.id)
    assert (ended.state, ended.ended_by) == ("verified", "guardian")
    assert bool(ended.unpulled) == (trouble is not None)
    assert recorded_machine.calls(there) == ["pull", "down"]


def test_g29_what_was_given_up_is_not_said_to_be_at_home(store: RecordStore, there: Path) -> None:
    """`launch down --give-up-results`, whose launch then dies: its guardian does not ask for them again."""
    record = left_alone(store, there)
    store.update(record.id, given_up=True)
    done = _guarded(store, record)
    assert done.returncode == 0, done.stderr
    assert store.load(record.id).unpulled == "the user gave them up"
    assert recorded_machine.calls(there) == ["down"]


@pytest.mark.slow
def test_g28_a_guardian_leaves_a_run_alone_that_another_launch_has_taken_up(
    store: RecordStore, there: Path
) -> None:
    """Its launch stood still, `launch down` went on without it, and the run was resumed."""
    record = left_alone(store, there)
    watch = subprocess.Popen(
        [sys.executable, PROGRAMS / "unit" / "end_run.py", store.runs.parent, record.id, "guardian"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ(),
    )
    assert watch.stdout is not None and watch.stdout.readline() == "ready\n"
    named = ProcessId.of(watch.pid)
    assert named is not None
    wait_until(lambda: _idle(named), what="it waits for the end of its pipe")
    store.update(record.id, state="verified", ended=time.time(), ended_by="down", proof={"verified": True})
    store.reopen(record.id)
    again = {"state": "work", "machine": recorded_machine.describe(there, PRICE), "url": "http://127.0.0.1:2"}
    store.update(record.id, **again)
    _, said = watch.communicate(timeout=180)
    assert watch.returncode == 0, said
    assert recorded_machine.calls(there) == [], said
    assert store.load(record.id).state == "work"


@pytest.mark.slow
def test_g01_a_guardian_whose_package_was_replaced_in_mid_run_still_ends_everything(tmp_path: Path) -> None:
    """What it needs at the moment of death it has imported before."""
    package = tmp_path / "package"
    for half in ("launcher", "runtime"):
        shutil.copytree(
            REPOSITORY / half, package / half, ignore=shutil.ignore_patterns("__pycache__", "*.safetensors")
        )
    home = tmp_path / "home"
    home.mkdir()
    launcher = subprocess.Popen(
        [sys.executable, PROGRAMS / "unit" / "watched_launcher.py", home, "KILL"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(package)},
    )
    assert launcher.stdout is not None and launcher.stdin is not None
    said = json.loads(launcher.stdout.readline())
    store = RecordStore(Home(home, home, home))
    wait_until((home / "child").exists, what="the keeper's child runs")
    watch = ProcessId.of(said["guardian"])
    assert watch is not None
    wait_until(lambda: _idle(watch), what="the guardian waits for the end of its pipe")
    shutil.rmtree(package)
    launcher.stdin.write(b"\n")
    launcher.stdin.close()
    launcher.wait(timeout=120)
    log = store.folder(said["run_id"]) / guardian.LOG
    try:
        wait_until(lambda: not store.load(said["run_id"]).live, what=log.read_text)
        assert store.load(said["run_id"]).ended_by == "guardian"
    finally:
        processes.end(lambda: process_inspection.with_variable(RUN_VARIABLE, said["run_id"]), 0)


def _guarded(store: RecordStore, record: RunRecord) -> subprocess.CompletedProcess[str]:
    """A guardian whose launcher is gone, to its end."""
    return subprocess.run(
        [sys.executable, PROGRAMS / "unit" / "end_run.py", store.runs.parent, record.id, "guardian"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=environ(),
    )


def _idle(process: ProcessId) -> bool:
    """Whether it has slept for a while, in a read of its pipe: what it had to import is imported."""
    ticks = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    time.sleep(0.5)
    return ticks == Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]


def test_p05_the_guardian_goes_on_with_growing_pauses_until_a_login_is_there_again(
    typed: Typed, store: RecordStore, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's token has expired: nothing can be asked until the user has logged in. Between two tries the
    guardian holds nobody up."""
    record = left_alone(store, there)
    (there / "unproven").touch()
    pauses: list[float] = []

    def rest(seconds: float) -> None:
        pauses.append(seconds)
        assert teardown_lock.owner(store.folder(record.id)) is None
        assert store.load(record.id).state == "unverified"
        if len(pauses) == 12:
            (there / "unproven").unlink()

    pausing(monkeypatch, rest)
    assert guardian._end(store, record.id, record.launch) == 0
    ended = store.load(record.id)
    assert (ended.state, ended.ended_by) == ("verified", "guardian")
    assert pauses[:5] == [2.0, 4.0, 8.0, 16.0, 32.0] and pauses[-1] == 300.0


def test_p05_down_ends_a_run_whose_guardian_rests_between_two_tries(
    typed: Typed, store: RecordStore, there: Path
) -> None:
    record = left_alone(store, there)
    (there / "unproven").touch()
    watch = subprocess.Popen(
        [sys.executable, PROGRAMS / "unit" / "end_run.py", store.runs.parent, record.id, "guardian"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environ(),
    )
    try:
        named = ProcessId.of(watch.pid)
        store.update(record.id, guardian=named)
        wait_until(lambda: store.load(record.id).state == "unverified", what="its first try")
        (there / "unproven").unlink()
        assert typed("down", "dev").returncode == 0
        assert store.load(record.id).state == "verified"
        assert watch.wait(timeout=300) == 0
    finally:
        watch.kill()
        watch.wait()


def test_p05_gc_ends_a_run_whose_guardian_rests_between_two_tries(
    typed: Typed, store: RecordStore, there: Path
) -> None:
    record = left_alone(store, there)
    rests = subprocess.Popen(["sleep", "600"])
    try:
        store.update(record.id, guardian=ProcessId.of(rests.pid), state="unverified")
        with teardown_lock.exclusive(store.folder(record.id), "guardian", print):
            assert store.load(record.id).is_attended
        assert not store.load(record.id).is_attended
        assert typed("gc", "--yes").returncode == 0
        assert store.load(record.id).state == "verified"
    finally:
        rests.kill()
        rests.wait()


def test_p05_down_waits_for_no_guardian_that_rests_though_the_record_cannot_say_so(
    typed: Typed, store: RecordStore, there: Path
) -> None:
    """A full disk: the record still says what it said before."""
    record = left_alone(store, there)
    rests = subprocess.Popen(["sleep", "600"])
    try:
        store.update(record.id, guardian=ProcessId.of(rests.pid))
        assert typed("down", "dev").returncode == 0
        assert store.load(record.id).state == "verified"
    finally:
        rests.kill()
        rests.wait()


def pausing(monkeypatch: pytest.MonkeyPatch, rest: Callable[[float], None]) -> None:
    """`rest` in place of a guardian's pauses between two tries; nobody else's."""
    monkeypatch.setattr(guardian, "time", SimpleNamespace(**{**vars(time), "sleep": rest}))


def test_s01_a_guardian_ends_the_wandb_run_before_it_copies(store: RecordStore, there: Path) -> None:
    """What wandb buffers is in its files only then, and the machine takes them along."""
    record = left_alone(store, there)
    details = {**record.details, "settings": {"wandb": "offline"}}
    store.update(record.id, details=details)
    assert guardian._end(store, record.id, record.launch) == 0
    assert (there / "calls").read_text().split()[:3] == ["close_wandb", "pull", "down"]


@pytest.mark.parametrize("gone", [True, False])
def test_p05_a_machine_that_had_ended_itself_costs_nothing_until_somebody_could_prove_it(
    store: RecordStore, there: Path, monkeypatch: pytest.MonkeyPatch, gone: bool
) -> None:
    """Its guardian could ask nobody for five hours; the machine's own lease had ended it long before."""
    lease, idle_minutes, hours = 900.0, 10, 5
    record = left_alone(store, there, 3600.0 * (hours + 1), lease_seconds=lease)
    store.update(record.id, machine={**record.machine, "idle_minutes": idle_minutes})
    heard = time.time() - 3600 * hours
    beat = store.folder(record.id) / heartbeat.FILE
    beat.touch()
    os.utime(beat, (heard, heard))
    (there / "unproven").touch()

    def rest(seconds: float) -> None:
        (there / "unproven").unlink()
        if gone:
            (there / "gone").touch()

    pausing(monkeypatch, rest)
    assert guardian._end(store, record.id, record.launch) == 0
    ended = store.load(record.id).ended
    assert ended is not None
    if gone:
        assert abs(ended - (heard + lease + 60 * idle_minutes + TIMER_SECONDS)) < 60
    else:
        assert ended > heard + 3600 * hours - 1, "it was there, and paid for"


@pytest.mark.parametrize(("slept_hours", "tries"), [(1, 4), (30, 12)])
def test_p05_a_guardian_gives_up_after_a_day_and_an_hour_awake(
    store: RecordStore, there: Path, monkeypatch: pytest.MonkeyPatch, slept_hours: int, tries: int
) -> None:
    """Tries and sleep are a part of the day. Who wakes has no network yet, and logs in again later."""
    record = left_alone(store, there)
    (there / "unproven").touch()
    now, asleep, begun = 1000.0, 0.0, 0

    def take_down(*_: object) -> Proof:
        nonlocal now, begun
        now, begun = now + (6 * 3600 if slept_hours == 1 else 300), begun + 1
        return Proof(False, "the login has expired")

    def rest(seconds: float) -> None:
        nonlocal now, asleep
        slept = 3600.0 * slept_hours if begun == 1 else 0.0  # the computer falls asleep
        now, asleep = now + seconds + slept, asleep + slept
        assert begun < 100

    monkeypatch.setattr(guardian, "_take_down", take_down)
    clock = SimpleNamespace(boot_seconds=lambda: now, asleep_seconds=lambda: asleep)
    monkeypatch.setattr(guardian, "clock", clock)
    pausing(monkeypatch, rest)
    assert guardian._end(store, record.id, record.launch) == 1
    assert begun == tries
