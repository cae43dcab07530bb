"""What a command writes is read up to a bound: a machine could send without an end (P16)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.base.bounded_run import OutputTooLong, run_bounded

MIB = 1 << 20
# In a session of its own it has the pipes, as ssh's master connection would. Its id is in a file by then.
HOLDER = "setsid sh -c 'echo $$ > holder; exec sleep 20' & until test -s holder; do sleep 0.01; done;"


@pytest.fixture
def holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file with the id of the process that HOLDER starts; it is ended with the test."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path / "holder"
    with contextlib.suppress(ProcessLookupError):
        os.kill(int((tmp_path / "holder").read_text()), signal.SIGKILL)


def lives(holder: Path) -> bool:
    return "sleep" in Path(f"/proc/{holder.read_text().strip()}/cmdline").read_text()


@pytest.mark.process
@pytest.mark.parametrize("command", ["cat /dev/zero", "cat /dev/zero >&2", "cat /dev/zero & wait"])
def test_p16_a_command_that_writes_without_an_end_is_killed_at_the_bound(command: str) -> None:
    with pytest.raises(OutputTooLong, match="more than 2 MiB"):
        run_bounded(["sh", "-c", command], b"", 600.0, 2 * MIB)


@pytest.mark.process
def test_p16_below_the_bound_all_of_it_is_there() -> None:
    done = run_bounded(["sh", "-c", "cat; echo no >&2; exit 3"], bytes(MIB), 600.0, MIB)
    assert (done.returncode, done.stdout, done.stderr) == (3, bytes(MIB), b"no\n")
    assert run_bounded(["true"], bytes(MIB), 600.0, MIB).returncode == 0, "it reads nothing of its stdin"
    both = run_bounded(["tee", "/dev/stderr"], bytes(range(256)) * 4096, 600.0, MIB)
    assert both.stdout == both.stderr == bytes(range(256)) * 4096


@pytest.mark.process
@pytest.mark.parametrize("command", ["sleep 600", "sleep 600 & exit 0"])
def test_p16_its_time_is_bounded_also_where_a_child_keeps_the_pipes(command: str) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run_bounded(["sh", "-c", command], b"", 0.5, MIB)


@pytest.mark.process
def test_p16_its_time_is_bounded_also_where_another_session_keeps_the_pipes(holder: Path) -> None:
    seconds = 0.25
    while not holder.exists() or not holder.read_text():  # it has begun within the bound
        seconds *= 2
        with pytest.raises(subprocess.TimeoutExpired):
            run_bounded(["sh", "-c", f"{HOLDER} echo hi"], b"", seconds, MIB)
    assert lives(holder)


@pytest.mark.process
@pytest.mark.parametrize("command", ["cat /dev/zero", "cat /dev/zero >&2"])
def test_p16_it_is_killed_at_the_bound_also_where_another_session_keeps_the_pipes(
    holder: Path, command: str
) -> None:
    with pytest.raises(OutputTooLong):
        run_bounded(["sh", "-c", f"{HOLDER} {command}"], b"", 600.0, 2 * MIB)
    assert lives(holder)
