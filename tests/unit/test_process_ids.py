"""launcher/base/processes.py: what is ended is what was named, and all of it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.base import process_inspection, processes
from launcher.base.processes import ProcessId
from tests.support.environment import PROGRAMS
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

_PROGRAMS = PROGRAMS / "unit"


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes to kill when the test is over."""
    found: list[subprocess.Popen[bytes]] = []
    yield found
    for process in found:
        process.kill()
        process.wait()


def test_p10_a_process_is_found_by_its_folder_where_that_is_behind_a_symlink(
    started: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    there, link = tmp_path / "there", tmp_path / "home"
    there.mkdir()
    link.symlink_to(there, target_is_directory=True)
    shutil.copy("/bin/sleep", there / "sleep")
    started.append(subprocess.Popen([there / "sleep", "600"], cwd=link))
    assert [it.pid for it in process_inspection.with_working_folder(link)] == [started[0].pid]
    assert process_inspection.runs_from(link) and process_inspection.runs_from(there)
    assert not process_inspection.runs_from(tmp_path / "other")


def test_p10_a_program_is_found_by_the_real_name_of_the_folder_that_it_was_started_from_by_a_symlink(
    started: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    there, link = tmp_path / "there", tmp_path / "home"
    there.mkdir()
    link.symlink_to(there, target_is_directory=True)
    (there / "python").symlink_to("/bin/sleep")  # as in a virtual environment
    started.append(subprocess.Popen([link / "python", "600"]))
    assert process_inspection.runs_from(link) and process_inspection.runs_from(there)


def test_a_reused_pid_is_another_process(started: list[subprocess.Popen[bytes]]) -> None:
    started.append(subprocess.Popen(["sleep", "600"]))
    other = ProcessId(started[0].pid, "an earlier one")

    assert not other.alive() and processes.tree({other}) == set()
    other.send(signal.SIGKILL)
    assert started[0].poll() is None


def test_a_zombie_has_ended() -> None:
    child = subprocess.Popen(["true"])
    wait_until(lambda: ProcessId.of(child.pid) is None, what="the child is a zombie")
    assert child.wait() == 0


def test_the_time_a_process_started_is_the_same_for_everyone() -> None:
    code = f"from launcher.base.processes import ProcessId; print(ProcessId.of({os.getpid()}).started)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == ProcessId.own().started


def test_a_tree_that_is_deaf_to_term_is_killed_after_the_grace(
    started: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    deaf = [sys.executable, _PROGRAMS / "wait_for_signal.py", tmp_path / "ready", "TERM"]
    started.append(subprocess.Popen([sys.executable, _PROGRAMS / "run_in_own_session.py", *deaf]))
    wait_until((tmp_path / "ready").exists, what="the child is deaf")
    root = ProcessId.of(started[0].pid)
    assert root is not None
    assert len(everyone := processes.tree({root})) == 2

    begun = time.monotonic()
    assert processes.end(lambda: processes.tree({root}), grace_seconds=0.3) == set()
    assert 0.3 <= time.monotonic() - begun < 60
    assert not any(process.alive() for process in everyone)


def test_what_carries_the_variable_is_found_wherever_it_went(started: list[subprocess.Popen[bytes]]) -> None:
    mark = uuid.uuid4().hex
    environ = {**os.environ, "SLIPWAY_TEST_MARK": mark}
    # Its parent is gone, it leads a session of its own: only its environment tells whose it is.
    left = ["sh", "-c", "setsid sleep 60 > /dev/null 2>&1 & echo $!"]
    said = subprocess.run(left, env=environ, capture_output=True, text=True, check=True)

    found = process_inspection.with_variable("SLIPWAY_TEST_MARK", mark)
    assert [process.pid for process in found] == [int(said.stdout)]
    assert processes.end(lambda: process_inspection.with_variable("SLIPWAY_TEST_MARK", mark), 1) == set()


def test_who_asks_is_not_what_is_left(started: list[subprocess.Popen[bytes]]) -> None:
    mark = uuid.uuid4().hex
    command = [sys.executable, _PROGRAMS / "count_carriers.py", "SLIPWAY_TEST_MARK", mark]
    said = subprocess.run(
        ["sh", "-c", '"$0" "$@"; true', *command],
        env={**os.environ, "SLIPWAY_TEST_MARK": mark},
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.strip() == "0"


def test_g17_a_forked_child_loads_no_library_before_its_exec() -> None:
    """A thread of the parent may hold the loader's lock at the fork: then the child would wait for ever."""
    done = subprocess.run(
        [sys.executable, _PROGRAMS / "fork_without_loading.py"], capture_output=True, text=True, timeout=180
    )
    assert (done.returncode, done.stdout) == (0, "ended with its parent's signal set\n"), done.stderr
