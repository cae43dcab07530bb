"""The guardian of a rented run has a process that asks the provider from the beginning on: an upgrade that
replaces this package in mid-run, or takes it away, leaves the run's end in what was imported before.

In the place of what a guardian would start is a program that answers as SkyPilot's calls do; record,
guardian, processes and the teardown are the real ones, out of a copy of the package that is taken away.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from launcher.backends import machine_from_record
from launcher.backends.cloud_machine import CloudMachine
from launcher.backends.skypilot.sky_home import SkyHome
from launcher.backends.skypilot.sky_process import SkyProcess
from launcher.backends.skypilot.standby_home import STANDBY_FOLDER, StandbyHome
from launcher.base.errors import PreflightError
from launcher.base.home import Home
from launcher.base.processes import ProcessId
from launcher.records.records import RecordStore, RunRecord
from launcher.teardown import guardian, leftovers
from tests.support.environment import PROGRAMS, REPOSITORY, python_with
from tests.support.waiting import wait_until

pytestmark = pytest.mark.process

WHERE = "aws/us-east-1"


@dataclass
class Laptop:
    """A home with one rented run that is up. `provider` is a folder of machines, `package` ours, to be
    replaced; `started` has a line for each process that was asked, or could not be: its pid."""

    folder: Path
    store: RecordStore
    provider: Path
    package: Path
    guardians: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def python(self) -> Path:
        """What is started in the place of this Python; it is of no use once the package is gone."""
        script = self.folder / "python"
        answers = PROGRAMS / "unit" / "answer_sky_calls.py"
        script.write_text(
            f"""#!/bin/sh
            echo $$ >> {self.folder}/started
            [ -e {self.package}/launcher ] || exit 1
            case "$3" in
            launcher.backends.skypilot.sky_calls) exec {sys.executable} {answers} {self.provider};;
            esac
            exit 1
            """
        )
        script.chmod(0o700)
        return script

    def rented(self) -> RunRecord:
        """A run that is being set up on a machine."""
        record = self.store.create(name="dev")
        folder = self.store.folder(record.id)
        machine = CloudMachine(record.id, folder, infra=[WHERE], gpus="H100:4", idle_minutes=10)
        (self.provider / "i-0123").touch()
        described = machine.describe() | {"asked": True, "standing": standing(record.id)}
        return self.store.update(record.id, state="setup", machine=described)

    def guard(self, record: RunRecord) -> subprocess.Popen[bytes]:
        """A guardian of the run that has begun to wait."""
        program = PROGRAMS / "unit" / "guard_rented.py"
        with (self.store.folder(record.id) / guardian.LOG).open("ab") as log:
            watch = subprocess.Popen(
                [sys.executable, program, self.python, self.store.path(record.id)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": str(self.package)},
            )
        self.guardians.append(watch)
        assert watch.stdout is not None and watch.stdout.readline() == b"ready\n"
        named = ProcessId.of(watch.pid)
        assert named is not None
        wait_until(lambda: self.started, what="somebody stands by")
        wait_until(lambda: _idle(named), what="the guardian waits for the end of its pipe")
        return watch

    @property
    def started(self) -> list[int]:
        path = self.folder / "started"
        return [int(pid) for pid in path.read_text().split()] if path.exists() else []

    def said(self, record: RunRecord) -> str:
        return (self.store.folder(record.id) / guardian.LOG).read_text()


def standing(run_id: str) -> dict[str, object]:
    """What SkyPilot's books said of its machine."""
    name = f"{run_id}-{run_id.removeprefix('slip-')}"
    provider = {"name": "AWS", "cluster": run_id, "cluster_on_cloud": name, "config": {"region": "us-east-1"}}
    return {
        "provider": provider, "where": WHERE, "instance_type": "p5.48xlarge", "price_per_hour": 27.52,
        "address": "10.0.0.1", "ssh": None,
    }  # fmt: skip


def _idle(process: ProcessId) -> bool:
    """Whether it has slept for a while: what it had to import is imported."""
    ticks = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    time.sleep(0.5)
    return ticks == Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]


def standing_by(laptop: Laptop, record: RunRecord) -> list[Path]:
    """The folders of those who stand by for it."""
    return sorted(laptop.store.folder(record.id).glob(f"{STANDBY_FOLDER}*"))


@pytest.fixture
def laptop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Laptop]:
    user, package, provider = tmp_path / "user", tmp_path / "package", tmp_path / "provider"
    (user / ".aws").mkdir(parents=True)
    (user / ".aws" / "credentials").write_text("[default]\n")
    monkeypatch.setenv("HOME", str(user))
    ignored = shutil.ignore_patterns("__pycache__", "*.safetensors")
    for half in ("launcher", "runtime"):
        shutil.copytree(REPOSITORY / half, package / half, ignore=ignored)
    provider.mkdir()
    home = tmp_path / "home"
    home.mkdir()
    laptop = Laptop(tmp_path, RecordStore(Home(home, home, home)), provider, package)
    yield laptop
    for watch in laptop.guardians:
        watch.kill()
        watch.wait()


@pytest.mark.slow
def test_g01_a_rented_machine_is_ended_by_a_guardian_whose_package_was_replaced_in_mid_run(
    laptop: Laptop,
) -> None:
    record = laptop.rented()
    watch = laptop.guard(record)
    (stands_by,) = laptop.started
    assert standing_by(laptop, record)
    shutil.rmtree(laptop.package)
    assert watch.stdin is not None
    watch.stdin.close()
    assert watch.wait(timeout=180) == 0, laptop.said(record)
    assert not os.listdir(laptop.provider), laptop.said(record)
    ended = laptop.store.load(record.id)
    assert (ended.state, ended.ended_by) == ("verified", "guardian")
    assert "is listed by AWS us-east-1" in str(ended.proof)
    assert len(laptop.started) > 1, "the package was tried: where it is there, a machine is ended by name"
    assert ProcessId.of(stands_by) is None
    assert not standing_by(laptop, record)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["released", "killed"])
def test_g01_whoever_stands_by_goes_with_the_guardian(laptop: Laptop, how: str) -> None:
    record = laptop.rented()
    watch = laptop.guard(record)
    (stands_by,) = laptop.started
    assert ProcessId.of(stands_by) is not None and watch.stdin is not None
    if how == "released":
        watch.communicate(b"released\n", timeout=180)
        assert watch.returncode == 0 and laptop.said(record) == ""
        assert ProcessId.of(stands_by) is None
    else:
        watch.send_signal(signal.SIGKILL)
        wait_until(lambda: ProcessId.of(stands_by) is None, what="its pipe has ended, and so has it")
        laptop.store.update(record.id, state="verified", launch=None)
        home = laptop.store.runs.parent
        finds = leftovers.find_leftovers(Home(home, home, home), None, False, 1e9)
        (find,) = (find for find in finds if STANDBY_FOLDER in find.what)
        find.remove()
    assert not standing_by(laptop, record)
    assert os.listdir(laptop.provider) == ["i-0123"]


@pytest.mark.slow
def test_g01_whoever_stands_by_is_asked_again_when_its_machine_was_not_proven_gone(
    laptop: Laptop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guardian tries three times: who is left of the old package must be there for each of them."""
    monkeypatch.setattr(sys, "executable", str(laptop.python))
    record = laptop.rented()
    standby = machine_from_record.prepare_teardown(record)
    assert isinstance(standby, StandbyHome)
    wait_until(lambda: laptop.started, what="somebody stands by")
    (stands_by,) = laptop.started
    shutil.rmtree(laptop.package)
    away = laptop.provider.rename(laptop.folder / "away")
    notes: list[str] = []
    try:
        assert not machine_from_record.end_machine(
            machine_from_record.from_record(record, standby), notes.append
        ).verified
        assert ProcessId.of(stands_by) is not None, "it is its owner's to end"
        away.rename(laptop.provider)
        assert machine_from_record.end_machine(
            machine_from_record.from_record(record, standby), notes.append
        ).verified, notes
        assert not os.listdir(laptop.provider) and ProcessId.of(stands_by) is not None
    finally:
        standby.remove()
    assert ProcessId.of(stands_by) is None


def test_g01_whoever_stands_by_imports_what_it_needs_before_it_is_asked(
    laptop: Laptop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the place of SkyPilot is a package that says so, and can do nothing."""
    home = SkyHome(laptop.folder / "sky-home", [WHERE], "0123abcd")
    home.make()
    (home.folder / "sky").mkdir()
    says_so = "import pathlib\npathlib.Path(__file__).with_name('imported').touch()\n"
    (home.folder / "sky" / "__init__.py").write_text(says_so)
    python = python_with(laptop.folder / "python", home.folder)
    monkeypatch.setattr(sys, "executable", str(python))
    sky = SkyProcess(home, laptop.folder / "skypilot.log")
    sky.warm_up()
    try:
        (asked,) = sky._own()
        wait_until((home.folder / "sky" / "imported").exists, what="it is imported, and nobody has asked")
        with pytest.raises(PreflightError, match="SkyPilot is not installed here"):
            sky.call("version", 60.0)
        assert sky._own() == {asked}
    finally:
        sky.end()


def test_g01_a_guardian_of_an_earlier_life_takes_no_later_ones_stand_in_away(
    laptop: Laptop, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = laptop.folder / "answers"
    program = PROGRAMS / "unit" / "answer_sky_calls.py"
    answers.write_text(f"#!/bin/sh\nexec {sys.executable} {program} {laptop.provider}\n")
    answers.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(answers))
    record = laptop.rented()
    earlier = machine_from_record.prepare_teardown(record)
    later = machine_from_record.prepare_teardown(record)
    assert isinstance(earlier, StandbyHome) and isinstance(later, StandbyHome)
    try:
        assert len(standing_by(laptop, record)) == 2, "who stands by still is left alone as well"
        earlier.remove()
        assert standing_by(laptop, record) == [later.home.folder]
        assert later.home.processes() == later.sky._own()
        later.sky.end()
        again = machine_from_record.prepare_teardown(record)
        assert isinstance(again, StandbyHome)
        later = again
        assert standing_by(laptop, record) == [later.home.folder], "what is left of one that is gone goes"
    finally:
        earlier.remove()
        later.remove()
