"""launcher/safety/guardian.py with real processes: however the launcher goes, the run's processes go too."""

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

from launcher.home import Home
from launcher.safety import processes
from launcher.safety.processes import ProcessId
from launcher.safety.records import RUN_VARIABLE, RecordStore, RunRecord
from tests.support.launched import wait_until

pytestmark = pytest.mark.slow

# A launcher as far as the guardian can see: record, guardian, machine, then a keeper whose child leaves its
# session (and once does not hear TERM), a straggler that no record names, and a program.
_LAUNCHER = """
import dataclasses, json, os, signal, subprocess, sys, time
from pathlib import Path
from launcher.home import Home
from launcher.machines.local import LocalMachine
from launcher.safety import guardian, minder
from launcher.safety.processes import ProcessId
from launcher.safety.records import RUN_VARIABLE, RecordStore

home, end = Path(sys.argv[1]), sys.argv[2]
store = RecordStore(Home(home, home, home))
run_id = store.create(name="watched").id
machine = LocalMachine(run_id, store.folder(run_id) / "machine", home / "environments")
store.update(run_id, machine=machine.describe())
watch = guardian.start(store.path(run_id))
store.update(run_id, guardian=watch.process)
machine.arm()
(Path(machine.socket_dir) / "gateway.sock").touch()
(store.folder(run_id) / "token").write_text("secret")
environ = {**os.environ, RUN_VARIABLE: run_id}
child = "import signal, time; time.sleep(99)"
if end == "KILL":
    child = child.replace(";", "; signal.signal(15, signal.SIG_IGN);")
tree = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], start_new_session=True)"
keeper = subprocess.Popen([sys.executable, "-c", tree], env=environ, start_new_session=True)
described = machine.describe() | {"keeper": dataclasses.asdict(ProcessId.of(keeper.pid))}
store.update(run_id, machine=described)
subprocess.Popen(["sleep", "99"], env=environ, start_new_session=True)
program = minder.start(["sleep", "99"], environ)
store.update(run_id, minder=program.process)
print(json.dumps({"run_id": run_id, "guardian": watch.process.pid}), flush=True)
sys.stdin.readline()
if end == "released":
    program.terminate()
    machine.down()
    store.update(run_id, state="verified", ended_by="launch", proof=machine.proof().to_dict())
    watch.release()
elif end == "exception":
    raise RuntimeError("a bug")
elif end == "exit":
    sys.exit(0)
else:
    os.kill(os.getpid(), getattr(signal, "SIG" + end))
    time.sleep(99)
"""


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
        return processes.carrying(RUN_VARIABLE, self.run_id)

    def go(self) -> None:
        """Let it meet its end."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.close()
        self.process.wait(timeout=10)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Any]:
    started: list[Launcher] = []

    def start(end: str) -> Launcher:
        process = subprocess.Popen(
            [sys.executable, "-c", _LAUNCHER, str(tmp_path), end],
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
        wait_until(lambda: len(started[0].left()) == 5, 10, "keeper, its child, straggler, minder, program")
        return started[0]

    yield start
    for launcher in started:
        launcher.process.kill()
        launcher.process.wait()
        wait_until(lambda: not launcher.guardian.alive(), 20, "the guardian is done")  # noqa: B023
        processes.end(launcher.left, 0)
        shutil.rmtree(Path(tempfile.gettempdir()) / launcher.run_id, ignore_errors=True)


@pytest.mark.parametrize("end", ["KILL", "TERM", "SEGV", "exception", "exit"])
def test_g01_however_the_launcher_dies_the_guardian_ends_everything(launch: Any, end: str) -> None:
    launcher: Launcher = launch(end)
    launcher.go()

    wait_until(lambda: not launcher.left(), 15, f"nothing is left: {launcher.left()}")
    wait_until(lambda: not launcher.record.live, 10, "the record says so")
    record = launcher.record
    assert (
        record.state == "verified"
        and record.ended_by == "guardian"
        and "without a word" in str(record.reason)
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

    wait_until(lambda: not launcher.record.live, 15, "the guardian acts all the same")


def test_a_guardian_ends_the_processes_of_a_run_whose_record_is_broken(launch: Any) -> None:
    launcher: Launcher = launch("TERM")
    launcher.store.path(launcher.run_id).write_text("{")
    launcher.go()

    wait_until(lambda: not launcher.left(), 15, "nothing is left")


def test_when_launcher_and_guardian_are_both_killed_the_minder_still_ends_the_program(launch: Any) -> None:
    launcher: Launcher = launch("TERM")
    minder = launcher.record.minder
    assert minder is not None
    program = processes.tree({minder})
    assert len(program) == 2
    launcher.guardian.send(signal.SIGKILL)
    launcher.go()

    wait_until(lambda: not any(process.alive() for process in program), 10, "minder and program are gone")


def test_the_guardian_imports_little() -> None:
    code = """
import sys, launcher.safety.guardian, launcher.machines.local
heavy = {"typer", "rich", "pydantic", "aiohttp", "httpx", "sky", "torch", "dspy"}
print(sorted(heavy & set(sys.modules)))
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"
