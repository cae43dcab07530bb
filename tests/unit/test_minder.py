"""launcher/teardown/minder.py with real processes: faithful to the command, and nothing of it is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launcher.base import process_inspection, processes
from launcher.base.processes import ProcessId
from launcher.teardown import minder
from tests.support.environment import PROGRAMS
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

_PROGRAMS = PROGRAMS / "unit"


@pytest.fixture
def run_id() -> Iterator[str]:
    """A run's id that the commands carry; what carries it afterwards is killed."""
    name = uuid.uuid4().hex
    yield name
    processes.end(lambda: process_inspection.with_variable(minder.COMMAND_VARIABLE, name), 0)


@pytest.fixture
def start(tmp_path: Path, run_id: str) -> Callable[..., minder.Command]:
    def start_command(*command: str, grace_seconds: float = 0.3) -> minder.Command:
        environ = {**os.environ, minder.COMMAND_VARIABLE: run_id}
        return minder.start(command, environ, tmp_path, grace_seconds)

    return start_command


def _left(run_id: str) -> set[ProcessId]:
    return process_inspection.with_variable(minder.COMMAND_VARIABLE, run_id)


def _script(code: str) -> tuple[str, str, str]:
    return (sys.executable, "-c", code)


def _program(name: str, *words: str) -> tuple[str, ...]:
    return (sys.executable, str(_PROGRAMS / name), *words)


@pytest.mark.parametrize("code", [0, 1, 7, 255])
def test_the_exit_code_is_the_commands_own(start: Callable[..., minder.Command], code: int) -> None:
    assert start("sh", "-c", f"exit {code}").wait(30) == code


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_ends_the_command_is_128_and_its_number(
    start: Callable[..., minder.Command], number: signal.Signals
) -> None:
    assert start("sh", "-c", f"kill -{number.value} $$").wait(30) == 128 + number


def test_what_cannot_be_started_is_said_as_a_shell_says_it(
    start: Callable[..., minder.Command], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text("not a program")
    assert start("no-such-program").wait(30) == 127
    assert start(str(tmp_path / "text")).wait(30) == 126
    assert "launch: no-such-program: No such file or directory" in capfd.readouterr().err


def test_the_command_has_our_streams_and_our_process_group(
    start: Callable[..., minder.Command], tmp_path: Path
) -> None:
    assert start(*_script("import os; open('group', 'w').write(str(os.getpgrp()))")).wait(30) == 0
    assert (tmp_path / "group").read_text() == str(os.getpgrp())


def test_the_command_does_not_hold_the_launchers_pipe(
    start: Callable[..., minder.Command], tmp_path: Path
) -> None:
    code = "import os; found = os.listdir('/proc/self/fd'); open('open', 'w').write(str(found))"
    assert start(*_script(code)).wait(30) == 0
    assert (tmp_path / "open").read_text() == "['0', '1', '2', '3']"  # 3 lists the folder


def test_a_polite_command_ends_in_its_own_way_when_it_is_told(
    start: Callable[..., minder.Command], tmp_path: Path
) -> None:
    command = start(*_program("wait_for_signal.py", "ready", "TERM", "42"), grace_seconds=30)
    wait_until((tmp_path / "ready").exists, what="the command runs")
    assert command.terminate() == 42


def test_a_deaf_command_is_killed_after_the_grace(
    start: Callable[..., minder.Command], tmp_path: Path, run_id: str
) -> None:
    command = start(*_program("wait_for_signal.py", "ready", "TERM"))
    wait_until((tmp_path / "ready").exists, what="the command runs")
    begun = time.monotonic()
    assert command.terminate() == 137
    assert 0.3 <= time.monotonic() - begun < 60 and not _left(run_id)


def test_what_the_command_leaves_in_the_background_ends_with_it(
    start: Callable[..., minder.Command], run_id: str
) -> None:
    # Twice removed and in a session of its own, as a daemon makes itself.
    assert start("sh", "-c", "setsid sh -c 'sleep 600 & sleep 600' & exit 3").wait(30) == 3
    assert not _left(run_id)


def test_orphans_that_end_early_are_collected(start: Callable[..., minder.Command], tmp_path: Path) -> None:
    assert start(*_program("leave_orphans.py")).wait(30) == 0
    assert "Z" not in (tmp_path / "states").read_text()


def test_ctrl_c_from_the_terminal_reaches_the_command_alone(tmp_path: Path) -> None:
    polite = _program("wait_for_signal.py", "ready", "INT", "42")
    process = subprocess.Popen(
        _program("launch_under_minder.py", *polite), cwd=tmp_path, start_new_session=True
    )
    wait_until((tmp_path / "ready").exists, what="the command runs")
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=120) == 42


def test_interrupt_is_for_a_command_that_no_terminal_told(
    start: Callable[..., minder.Command], tmp_path: Path
) -> None:
    command = start(*_program("wait_for_signal.py", "ready", "INT", "5"))
    wait_until((tmp_path / "ready").exists, what="the command runs")
    command.interrupt()
    assert command.wait(30) == 5


def test_a_command_under_nohup_stays_deaf_to_hup(tmp_path: Path) -> None:
    code = "import signal; open('hup', 'w').write(signal.getsignal(signal.SIGHUP).name)"
    subprocess.run(
        ["nohup", *_program("launch_under_minder.py", *_script(code))],
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    assert (tmp_path / "hup").read_text() == "SIG_IGN"


def test_when_the_minder_is_killed_the_command_and_all_below_are_gone(
    start: Callable[..., minder.Command], tmp_path: Path, run_id: str
) -> None:
    deaf = _program("wait_for_signal.py", "ready", "TERM")
    command = start(*_program("run_in_own_session.py", *deaf))
    wait_until((tmp_path / "ready").exists, what="the command's child runs")
    assert command.process is not None
    command.process.send(signal.SIGKILL)
    assert command.wait(30) == 137
    assert not _left(run_id)


def test_when_the_launcher_is_killed_the_minder_ends_the_command(tmp_path: Path, run_id: str) -> None:
    process = subprocess.Popen(
        _program("launch_under_minder.py", "sh", "-c", "touch ready; setsid sleep 600 & sleep 600"),
        cwd=tmp_path,
        env={**os.environ, minder.COMMAND_VARIABLE: run_id},
    )
    wait_until((tmp_path / "ready").exists, what="the command runs")
    process.kill()
    process.wait()
    wait_until(lambda: not _left(run_id), what="nothing is left")


def test_g31_a_command_ends_as_it_did_where_the_system_has_no_waitid(tmp_path: Path) -> None:
    """Python has none on macOS before 3.13."""
    program = _program("minder_without_waitid.py", "sh", "-c", "sh -c 'exit 0'; sleep 0.1 & wait; exit 7")
    theirs, ours = os.pipe()
    done = subprocess.run(
        [*program[:2], "--pipe", str(theirs), "--", *program[2:]],
        cwd=tmp_path,
        pass_fds=(theirs,),
        capture_output=True,
        text=True,
    )
    os.close(theirs)
    os.close(ours)
    assert (done.returncode, done.stderr) == (7, "")
