"""launcher/safety/minder.py with real processes: faithful to the command, and nothing of it is left."""

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

from launcher.safety import minder, processes
from launcher.safety.processes import ProcessId
from tests.support.launched import wait_until

pytestmark = pytest.mark.slow

_DEAF = "import signal, time; signal.signal(15, signal.SIG_IGN); open('ready', 'w'); time.sleep(60)"


@pytest.fixture
def run_id() -> Iterator[str]:
    """A run's id that the commands carry; what carries it afterwards is killed."""
    name = uuid.uuid4().hex
    yield name
    processes.end(lambda: processes.carrying(minder.COMMAND_VARIABLE, name), 0)


@pytest.fixture
def start(tmp_path: Path, run_id: str) -> Callable[..., minder.Command]:
    def start_command(*command: str, grace_seconds: float = 0.3) -> minder.Command:
        environ = {**os.environ, minder.COMMAND_VARIABLE: run_id}
        return minder.start(command, environ, tmp_path, grace_seconds)

    return start_command


def _left(run_id: str) -> set[ProcessId]:
    return processes.carrying(minder.COMMAND_VARIABLE, run_id)


def _script(code: str) -> tuple[str, str, str]:
    return (sys.executable, "-c", code)


@pytest.mark.parametrize("code", [0, 1, 7, 255])
def test_the_exit_code_is_the_commands_own(start: Callable[..., minder.Command], code: int) -> None:
    assert start("sh", "-c", f"exit {code}").wait(10) == code


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_ends_the_command_is_128_and_its_number(
    start: Callable[..., minder.Command], number: signal.Signals
) -> None:
    assert start("sh", "-c", f"kill -{number.value} $$").wait(10) == 128 + number


def test_what_cannot_be_started_is_said_as_a_shell_says_it(
    start: Callable[..., minder.Command], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text("not a program")
    assert start("no-such-program").wait(10) == 127
    assert start(str(tmp_path / "text")).wait(10) == 126
    assert "launch: no-such-program: No such file or directory" in capfd.readouterr().err


def test_the_command_has_our_streams_and_our_process_group(
    start: Callable[..., minder.Command], tmp_path: Path
) -> None:
    assert start(*_script("import os; open('group', 'w').write(str(os.getpgrp()))")).wait(10) == 0
    assert (tmp_path / "group").read_text() == str(os.getpgrp())


def test_the_command_does_not_hold_the_launchers_pipe(
    start: Callable[..., minder.Command], tmp_path: Path
) -> None:
    code = "import os; found = os.listdir('/proc/self/fd'); open('open', 'w').write(str(found))"
    assert start(*_script(code)).wait(10) == 0
    assert (tmp_path / "open").read_text() == "['0', '1', '2', '3']"  # 3 lists the folder


def test_a_polite_command_ends_in_its_own_way_when_it_is_told(
    start: Callable[..., minder.Command], tmp_path: Path
) -> None:
    code = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(42))
open('ready', 'w')
time.sleep(60)
"""
    command = start(*_script(code), grace_seconds=10)
    wait_until((tmp_path / "ready").exists, 10, "the command runs")
    assert command.terminate() == 42


def test_a_deaf_command_is_killed_after_the_grace(
    start: Callable[..., minder.Command], tmp_path: Path, run_id: str
) -> None:
    command = start(*_script(_DEAF))
    wait_until((tmp_path / "ready").exists, 10, "the command runs")
    begun = time.monotonic()
    assert command.terminate() == 137
    assert 0.3 <= time.monotonic() - begun < 5 and not _left(run_id)


def test_what_the_command_leaves_in_the_background_ends_with_it(
    start: Callable[..., minder.Command], run_id: str
) -> None:
    # Twice removed and in a session of its own, as a daemon makes itself.
    assert start("sh", "-c", "setsid sh -c 'sleep 60 & sleep 60' & exit 3").wait(10) == 3
    assert not _left(run_id)


def test_orphans_that_end_early_are_collected(start: Callable[..., minder.Command], tmp_path: Path) -> None:
    code = """
import os, subprocess, sys, time
for _ in range(3):
    subprocess.run(["sh", "-c", "sleep 0.05 &"])
time.sleep(0.4)
states = []
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        state, parent = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        continue  # a stranger that has just ended
    if parent == str(os.getppid()):
        states.append(state)
open("states", "w").write(str(states))
"""
    assert start(*_script(code)).wait(10) == 0
    assert "Z" not in (tmp_path / "states").read_text()


def test_ctrl_c_from_the_terminal_reaches_the_command_alone(tmp_path: Path) -> None:
    program = """
import signal, sys, time
signal.signal(signal.SIGINT, lambda *_: sys.exit(42))
open('ready', 'w')
time.sleep(60)
"""
    launcher = """
import os, signal, sys
from launcher.safety import minder
signal.signal(signal.SIGINT, lambda *_: None)
sys.exit(minder.start([sys.executable, "-c", sys.argv[1]], os.environ).wait())
"""
    process = subprocess.Popen(
        [sys.executable, "-c", launcher, program], cwd=tmp_path, start_new_session=True
    )
    wait_until((tmp_path / "ready").exists, 10, "the command runs")
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=10) == 42


def test_interrupt_is_for_a_command_that_no_terminal_told(
    start: Callable[..., minder.Command], tmp_path: Path
) -> None:
    code = """
import sys, time
open('ready', 'w')
try:
    time.sleep(60)
except KeyboardInterrupt:
    sys.exit(5)
"""
    command = start(*_script(code))
    wait_until((tmp_path / "ready").exists, 10, "the command runs")
    command.interrupt()
    assert command.wait(10) == 5


def test_a_command_under_nohup_stays_deaf_to_hup(tmp_path: Path) -> None:
    code = "import signal; open('hup', 'w').write(signal.getsignal(signal.SIGHUP).name)"
    launcher = (
        "import os, sys; from launcher.safety import minder; minder.start(sys.argv[1:], os.environ).wait()"
    )
    subprocess.run(
        ["nohup", sys.executable, "-c", launcher, *_script(code)],
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    assert (tmp_path / "hup").read_text() == "SIG_IGN"


def test_when_the_minder_is_killed_the_command_and_all_below_are_gone(
    start: Callable[..., minder.Command], tmp_path: Path, run_id: str
) -> None:
    code = (
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {_DEAF!r}], start_new_session=True)"
    )
    command = start(*_script(code))
    wait_until((tmp_path / "ready").exists, 10, "the command's child runs")
    assert command.process is not None
    command.process.send(signal.SIGKILL)
    assert command.wait(10) == 137
    assert not _left(run_id)


def test_when_the_launcher_is_killed_the_minder_ends_the_command(tmp_path: Path, run_id: str) -> None:
    launcher = (
        "import os, sys; from launcher.safety import minder; minder.start(sys.argv[1:], os.environ).wait()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", launcher, "sh", "-c", "touch ready; setsid sleep 60 & sleep 60"],
        cwd=tmp_path,
        env={**os.environ, minder.COMMAND_VARIABLE: run_id},
    )
    wait_until((tmp_path / "ready").exists, 10, "the command runs")
    process.kill()
    process.wait()
    wait_until(lambda: not _left(run_id), 10, "nothing is left")
