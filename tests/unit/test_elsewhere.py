"""One home, several computers and containers: a run of another one is never taken for dead.

Another PID namespace and another boot id are real (`containers.py`). A rented run of the
test cloud is named from another container in `tests/cloud/test_ends.py`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.base import process_inspection, process_location
from launcher.base.home import Home
from launcher.base.process_location import ProcessLocation
from launcher.base.processes import ProcessId
from launcher.records import heartbeat, reachability, teardown_lock
from launcher.records.records import RUN_VARIABLE, RecordStore, RunRecord
from launcher.records.teardown_lock import LockOwner
from launcher.teardown import leftovers
from tests.support import containers, recorded_machine
from tests.support.environment import PROGRAMS
from tests.support.typed import Typed
from tests.support.waiting import wait_until

pytestmark = pytest.mark.process

HEARTBEAT = "heartbeat"
PLACES = ["another container", "another computer"]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


@pytest.fixture
def store(home: Path) -> RecordStore:
    return RecordStore(Home.find({"LAUNCH_HOME": str(home)}))


@pytest.fixture
def local_run(home: Path) -> Iterator[str]:
    """A run on this computer, alive in a container of its own: launch, guardian, keeper, minder, program."""
    words = [sys.executable, PROGRAMS / "unit" / "watched_launcher.py", home, "TERM"]
    process = containers.start(
        containers.container(*words), stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    run_id: str = json.loads(process.stdout.readline())["run_id"]
    wait_until(
        lambda: len(process_inspection.with_variable(RUN_VARIABLE, run_id)) == 5, what="all of it runs"
    )
    yield run_id
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    wait_until(
        lambda: not process_inspection.with_variable(RUN_VARIABLE, run_id), what="its container is gone"
    )


def rented(store: RecordStore, there: Path) -> RunRecord:
    """A run named dev on a rented machine, whose launch is this process."""
    record = store.create(name="dev", command=("true",))
    (store.folder(record.id) / HEARTBEAT).touch()
    machine = recorded_machine.describe(there, 12.0)
    return store.update(record.id, state="work", machine=machine, url="http://127.0.0.1:1")


def typed_from(where: str, home: Path, *lines: list[str]) -> list[tuple[int, str]]:
    """The exit code of each line and all that it said, typed in a place that shares this home."""
    words = [sys.executable, PROGRAMS / "unit" / "type_elsewhere.py", home, json.dumps(lines)]
    at = {
        "another container": lambda: containers.container(*words),
        "another computer": lambda: containers.computer(home.parent, "gpubox", *words),
        "a new boot": lambda: containers.computer(home.parent, "", *words),
    }[where]()
    process = containers.start(at, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    return [(code, said + errors) for code, said, errors in json.loads(stdout.splitlines()[-1])]


def be_silent(store: RecordStore, run_id: str, seconds: float = 600.0) -> None:
    """Nobody has renewed its heartbeat for so long."""
    then = time.time() - seconds
    path = store.folder(run_id) / HEARTBEAT
    path.touch()
    os.utime(path, (then, then))


@pytest.mark.parametrize("where", PLACES)
def test_p01_a_live_local_run_of_another_place_is_left_alone(
    where: str, home: Path, store: RecordStore, local_run: str
) -> None:
    lines = [["gc", "--yes"], ["status"], ["status", "watched"], ["doctor"]]
    lines += [["--resume", "watched", "--", "true"], ["--name", "watched", "--", "true"], ["down", "watched"]]
    gc, table, status, doctor, resume, attach, down = typed_from(where, home, *lines)

    assert len(process_inspection.with_variable(RUN_VARIABLE, local_run)) == 5, "its processes live"
    record = store.load(local_run)
    assert record.live and record.proof is None
    lives = f"lives on {where}"
    if where == "another computer":
        lives = "lives on another computer or container"
    assert gc[0] == 0 and lives in gc[1] and "nothing behind" in gc[1]
    assert record.place is not None and f"on {record.place.host}" in table[1]
    assert lives.removeprefix("lives ") in status[1] and "left alone" not in status[1]
    assert lives in doctor[1] and "launch gc" not in doctor[1]
    assert resume[0] == 2 and lives in resume[1]
    assert attach[0] == 2 and lives in attach[1]
    assert down[0] == 5 and "cannot be ended from here" in down[1] and "is down" not in down[1]


@pytest.mark.parametrize("where", PLACES)
def test_g34_a_live_rented_run_of_another_place_is_left_alone_until_it_is_named(
    where: str, home: Path, store: RecordStore, tmp_path: Path
) -> None:
    record = rented(store, tmp_path / "there")
    lines = [["gc", "--yes"], ["status", "dev"], ["doctor"], ["--resume", "dev", "--", "true"]]
    gc, status, doctor, resume, down = typed_from(where, home, *lines, ["down", "dev"])

    assert recorded_machine.calls(tmp_path / "there") == [], "nothing was asked of its provider"
    assert store.load(record.id).live
    host = record.place.host if record.place else "?"
    for code, (got, said) in zip([0, 0, None, 2, 2], [gc, status, doctor, resume, down], strict=True):
        assert code is None or got == code, said
        assert host in said and "heard of" in said, said
    assert "launch down dev --elsewhere" in down[1]

    ((code, said),) = typed_from(where, home, ["down", "dev", "--elsewhere"])
    assert code == 0 and "its machine is ended at its provider, from here" in said, said
    assert recorded_machine.calls(tmp_path / "there") == ["pull", "down"]
    assert store.load(record.id).state == "verified"


def test_p01_a_rented_run_that_is_asking_for_its_machine_elsewhere_is_not_ended(
    home: Path, store: RecordStore, tmp_path: Path
) -> None:
    record = rented(store, tmp_path / "there")
    store.update(record.id, state="arm")
    ((code, said),) = typed_from("another container", home, ["down", "dev", "--elsewhere"])
    assert code == 2 and "is asking a provider for its machine" in said
    assert recorded_machine.calls(tmp_path / "there") == [] and store.load(record.id).live


def test_p01_a_run_of_another_place_that_is_silent_is_still_nobodys_to_end_unless_it_is_named(
    home: Path, store: RecordStore, tmp_path: Path
) -> None:
    record = rented(store, tmp_path / "there")
    be_silent(store, record.id)
    gc, resume = typed_from("another container", home, ["gc", "--yes"], ["--resume", "dev", "--", "true"])
    assert gc[0] == 0 and "silent: last heard of 10m" in gc[1]
    assert resume[0] == 2 and store.load(record.id).live
    assert recorded_machine.calls(tmp_path / "there") == []

    ((code, _),) = typed_from("another container", home, ["down", "dev"])
    assert code == 0 and recorded_machine.calls(tmp_path / "there") == ["pull", "down"]


def test_p01_a_local_run_whose_container_is_gone_ends_by_the_word_of_whoever_names_it(
    home: Path, store: RecordStore
) -> None:
    record = store.create(name="dev")
    (store.folder(record.id) / HEARTBEAT).touch()
    ((code, said),) = typed_from("another container", home, ["down", "dev", "--elsewhere"])
    assert code == 5 and store.load(record.id).live, said
    be_silent(store, record.id)
    first, second = typed_from("another container", home, ["down", "dev"], ["down", "dev", "--elsewhere"])
    assert first[0] == 5 and "launch down dev --elsewhere" in first[1]
    assert second[0] == 0 and "you said that" in second[1], second[1]
    assert not store.load(record.id).live


def test_p01_after_a_reboot_what_ran_before_it_is_dead(
    home: Path, store: RecordStore, tmp_path: Path
) -> None:
    record = rented(store, tmp_path / "there")
    alive = typed_from("a new boot", home, ["gc", "--yes"])
    assert "left alone" in alive[0][1], "a sign of life that is newer than a boot is another computer's"
    assert recorded_machine.calls(tmp_path / "there") == []

    before_boot = float(Path("/proc/uptime").read_text().split()[0]) + 60
    be_silent(store, record.id, before_boot)
    ((code, said),) = typed_from("a new boot", home, ["gc", "--yes"])
    assert code == 0 and "down: verified" in said, said
    assert recorded_machine.calls(tmp_path / "there") == ["pull", "down"]
    assert store.load(record.id).ended_by == "gc"


def test_p01_an_attempt_to_end_a_run_is_no_sign_of_its_life(
    home: Path, store: RecordStore, tmp_path: Path
) -> None:
    """It rebooted, and its provider could not be asked the first time: the second time it still may be."""
    record = rented(store, tmp_path / "there")
    before_boot = float(Path("/proc/uptime").read_text().split()[0]) + 60
    be_silent(store, record.id, before_boot)
    (tmp_path / "there" / "unproven").touch()
    ((code, said),) = typed_from("a new boot", home, ["down", "dev"])
    assert code == 5 and store.load(record.id).live, said
    (tmp_path / "there" / "unproven").unlink()
    ((code, said),) = typed_from("a new boot", home, ["gc", "--yes"])
    assert code == 0 and "down: verified" in said, said
    assert store.load(record.id).ended_by == "gc"


def test_p01_a_containers_own_home_is_not_taken_for_ours_by_its_path(
    home: Path, store: RecordStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(leftovers, "socket_parents", lambda: [])
    store.create(name="other")
    code = store.folder("slip-01234567") / "machine" / "code"
    words = ["env", f"{RUN_VARIABLE}=slip-01234567", f"PYTHONPATH={code}", "sleep", "600"]
    process = containers.start(containers.container(*words), start_new_session=True)
    try:
        wait_until(
            lambda: bool(process_inspection.with_variable(RUN_VARIABLE, "slip-01234567")), what="it runs"
        )
        assert Typed(tmp_path / "project", home)("gc", "--yes").returncode == 0
        assert process_inspection.with_variable(RUN_VARIABLE, "slip-01234567"), (
            "it is the container's own run's"
        )
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_p01_whoever_attends_a_run_renews_its_heartbeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "INTERVAL_SECONDS", 0.01)
    path = tmp_path / HEARTBEAT
    assert heartbeat.age_seconds(tmp_path) is None and not reachability.is_stale(tmp_path)
    with heartbeat.keep_beating(tmp_path):
        for _ in range(2):  # it goes on after a beat that was made long ago
            os.utime(path, (0, 0))
            wait_until(lambda: path.stat().st_mtime > 0, what="the next beat")
    os.utime(path, (0, 0))
    assert reachability.is_stale(tmp_path)


def test_p01_a_heartbeat_on_a_full_disk_or_in_no_folder_ends_nothing(tmp_path: Path) -> None:
    with heartbeat.keep_beating(tmp_path / "gone"):
        assert heartbeat.age_seconds(tmp_path / "gone") is None


@pytest.mark.quick
def test_p01_places_are_compared_by_kernel_then_by_computer() -> None:
    here = ProcessLocation("c", "boot", "pid:[1]", "vm")
    assert here.visibility_from(here) == "here"
    assert dataclasses.replace(here, computer="d", host="renamed").visibility_from(here) == "here"
    assert dataclasses.replace(here, pids="pid:[2]").visibility_from(here) == "elsewhere"
    assert dataclasses.replace(here, boot="b").visibility_from(here) == "rebooted"
    assert dataclasses.replace(here, boot="b", pids="pid:[2]").visibility_from(here) == "rebooted"
    assert dataclasses.replace(here, boot="b", computer="d").visibility_from(here) == "elsewhere"
    mac = ProcessLocation("c", None, None, "mac")
    assert mac.visibility_from(mac) == "here"
    assert mac.visibility_from(ProcessLocation("d", None, None, "mac")) == "elsewhere"


@pytest.mark.quick
@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac is not told by its name")
def test_p01_a_computer_that_its_network_names_in_full_is_the_same() -> None:
    assert (
        process_location._computer("fedora")
        == process_location._computer("Fedora.fritz.box")
        != process_location._computer("debian.fritz.box")
    )


@pytest.mark.quick
def test_p01_a_record_of_an_older_version_is_here_as_before(store: RecordStore) -> None:
    record = store.create()
    values = json.loads(store.path(record.id).read_text())
    assert "folder" not in values
    del values["place"]
    store.path(record.id).write_text(json.dumps(values))
    old = store.load(record.id)
    assert old.place is None and not old.elsewhere and old.is_attended and old.launch_alive


@pytest.mark.quick
def test_p01_who_ends_a_run_elsewhere_stands_still_when_the_folder_is_silent(store: RecordStore) -> None:
    record = store.create()
    there = ProcessLocation("other", "other boot", "pid:[1]", "gpubox")
    holder = LockOwner("down", ProcessId(2**22, "long ago"), "copying results", there)
    assert "on gpubox" in holder.describe()
    (record.folder / heartbeat.TEARDOWN_FILE).touch()
    assert not holder.is_stuck(record.folder)
    be_silent(store, record.id)
    teardown_lock.create(record.folder)
    (record.folder / teardown_lock.FILE).write_text(json.dumps(dataclasses.asdict(holder)))
    assert not record.silent, "whoever ends it there attends it"
    os.utime(record.folder / heartbeat.TEARDOWN_FILE, (0, 0))
    assert holder.is_stuck(record.folder) and record.silent
