"""What a command writes is read up to a bound: a machine could send without an end (P16)."""

from __future__ import annotations

import subprocess

import pytest

from launcher.base.bounded_run import OutputTooLong, run_bounded

MIB = 1 << 20


@pytest.mark.process
@pytest.mark.parametrize("command", ["cat /dev/zero", "cat /dev/zero >&2", "cat /dev/zero & wait"])
def test_p16_a_command_that_writes_without_an_end_is_killed_at_the_bound(command: str) -> None:
    with pytest.raises(OutputTooLong, match="more than 2 MiB"):
        run_bounded(["sh", "-c", command], b"", 600.0, 2 * MIB)


@pytest.mark.process
def test_p16_below_the_bound_all_of_it_is_there(tmp_path) -> None:
    done = run_bounded(["sh", "-c", "cat; echo no >&2; exit 3"], bytes(MIB), 600.0, MIB)
    assert (done.returncode, done.stdout, done.stderr) == (3, bytes(MIB), b"no\n")
    assert run_bounded(["true"], bytes(MIB), 600.0, MIB).returncode == 0, "it reads nothing of its stdin"


@pytest.mark.process
@pytest.mark.parametrize("command", ["sleep 600", "sleep 600 & exit 0"])
def test_p16_its_time_is_bounded_also_where_a_child_keeps_the_pipes(command: str) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run_bounded(["sh", "-c", command], b"", 0.5, MIB)
