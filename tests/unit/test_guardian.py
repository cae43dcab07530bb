"""launcher/teardown/guardian.py with real processes: however the launcher ends, its run ends too."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from launcher.base import process_inspection, processes
from launcher.base.home import Home
from launcher.base.processes import ProcessId
from launcher.records.records import RUN_VARIABLE, RecordStore, RunRecord
from tests.support.environment import PROGRAMS
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow


@dataclass
class Launcher:
    """The launcher process, its run, and the processes that must not outlive it."""

    process: subprocess.Popen[bytes]
    store: RecordStore
    run_id: str
    guardian: ProcessId

    @property
    def record(self) -> RunRecord:
        return self.store.load(self.run_id)

    def left(self) -> set[ProcessId]:
        return process_inspection.with_variable(RUN_VARIABLE, self.run_id)

    def go(self) -> None:
        """Let it meet its end."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.close()
        self.process.wait(timeout=120)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Any]:
    started: list[Launcher] = []

    def start(end: str) -> Launcher:
        process = subprocess.Popen(
            [sys.executable, PROGRAMS / "unit" / "watched_launcher.py", tmp_path, end],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdout is not None
        said: dict[str, Any] = json.loads(process.stdout.readline())
        guardian = ProcessId.of(said["guardian"])
        assert guardian is not None
        store = RecordStore(Home(tmp_path, tmp_path, tmp_path))
        started.append(Launcher(process, store, said["run_id"], guardian))
        wait_until(lambda: len(started[0].left()) == 5, what="keeper, its child, straggler, minder, program")
        wait_until((tmp_path / "child").exists, what="the keeper's child runs")
        return started[0]

    yield start
    for launcher in started:
        launcher.process.kill()
        launcher.process.wait()
        wait_until(lambda: not launcher.guardian.alive(), what="the guardian is done")  # noqa: B023
        processes.end(launcher.left, 0)
        shutil.rmtree(Path(tempfile.gettempdir()) / launcher.run_id, ignore_errors=True)


@pytest.mark.parametrize("end", ["KILL", "TERM", "SEGV", "exception", "exit"])
def test_g01_however_the_launcher_dies_the_guardian_ends_everything(launch: Any, end: str) -> None:
    launcher: Launcher = launch(end)
    launcher.go()

    wait_until(lambda: not launcher.left(), what=lambda: f"nothing is left: {launcher.left()}")
    wait_until(lambda: not launcher.record.live, what="the record says so")
    record = launcher.record
    assert (
        record.state == "verified" and record.ended_by == "guardian" and "unexpectedly" in str(record.reason)
    )
    assert record.proof is not None and record.proof["verified"]
    assert not Path(record.machine["socket_dir"]).exists()
    assert not (launcher.store.folder(record.id) / "token").exists()


def test_a_released_guardian_leaves_everything_to_the_launcher(launch: Any) -> None:
    launcher: Launcher = launch("released")
    launcher.go()

    assert not launcher.guardian.alive() and not launcher.left()
    assert launcher.record.ended_by == "launch"
    assert (launcher.store.folder(launcher.run_id) / "guardian.log").read_text() == ""


def test_what_the_terminal_sends_does_not_end_the_guardian(launch: Any) -> None:
    launcher: Launcher = launch("TERM")
    assert os.getsid(launcher.guardian.pid) != os.getsid(launcher.process.pid)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        launcher.guardian.send(number)
    launcher.go()

    wait_until(lambda: not launcher.record.live, what="the guardian acts all the same")


def test_a_guardian_ends_the_processes_of_a_run_whose_record_is_broken(launch: Any) -> None:
    launcher: Launcher = launch("TERM")
    launcher.store.path(launcher.run_id).write_text("{")
    launcher.go()

    wait_until(lambda: not launcher.left(), what="nothing is left")


def test_when_launcher_and_guardian_are_both_killed_the_minder_still_ends_the_program(launch: Any) -> None:
    launcher: Launcher = launch("TERM")
    minder = launcher.record.minder
    assert minder is not None
    program = processes.tree({minder})
    assert len(program) == 2
    launcher.guardian.send(signal.SIGKILL)
    launcher.go()

    wait_until(lambda: not any(process.alive() for process in program), what="minder and program are gone")


def test_the_guardian_imports_little() -> None:
    heavy = "typer,rich,pydantic,aiohttp,httpx,sky,torch,dspy"
    modules = ["launcher.teardown.guardian", "launcher.backends.local_machine"]
    program = PROGRAMS / "unit" / "unwanted_imports.py"
    done = subprocess.run(
        [sys.executable, program, heavy, "import", *modules], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
