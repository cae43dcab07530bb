"""A side of a bench never outlives the bench, and gets the chance to end its own run well."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from launcher.base.errors import JobFailed
from launcher.bench import child
from launcher.bench.cpu_seconds import ALL
from tests.support.environment import PROGRAMS
from tests.support.waiting import wait_until

pytestmark = pytest.mark.process

STARTER = PROGRAMS / "unit" / "bench_child.py"
# Says that it is there, and how it was told to end; below it stands one that heeds nothing.
SIDE = """
import os, pathlib, signal, subprocess, sys, time
def end(number, frame):
    pathlib.Path("told").write_text(signal.Signals(number).name)
    below.kill()
    sys.exit(0)
below = subprocess.Popen(["sleep", "300"])
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, end)
pathlib.Path("pids").write_text(f"{os.getpid()} {below.pid}")
while True:
    time.sleep(1)
"""


@pytest.fixture
def starter(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs SIDE, which is there."""
    started = subprocess.Popen([sys.executable, STARTER, tmp_path, sys.executable, "-c", SIDE])
    wait_until(lambda: (tmp_path / "pids").exists() and (tmp_path / "pids").read_text() != "", 30)
    yield started
    started.kill()
    started.wait()


def gone(folder: Path) -> bool:
    pids = map(int, (folder / "pids").read_text().split())
    return not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.parametrize(("struck", "told"), [(signal.SIGINT, "SIGINT"), (signal.SIGKILL, "SIGTERM")])
def test_a_side_is_told_to_end_when_its_bench_ends(
    starter: subprocess.Popen[bytes], tmp_path: Path, struck: signal.Signals, told: str
) -> None:
    starter.send_signal(struck)
    code = starter.wait(30)
    assert code == (130 if struck is signal.SIGINT else -signal.SIGKILL)
    wait_until(lambda: gone(tmp_path), 30)
    assert (tmp_path / "told").read_text() == told


def run(folder: Path, program: str, max_seconds: float) -> child.ProcessLifetime:
    return child.run(
        "the program",
        [sys.executable, "-c", program],
        folder=folder,
        environ=os.environ,
        max_seconds=max_seconds,
        progress=lambda line: None,
    )


def test_a_side_that_fails_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(JobFailed) as failed:
        run(tmp_path, "import sys; print('a line', file=sys.stderr); sys.exit('the very last')", 60.0)
    assert failed.value.message == "the program ended with code 1"
    assert failed.value.why == "the very last" and failed.value.last_lines[-2:] == ["a line", "the very last"]
    assert failed.value.hint == f"less {tmp_path / 'stderr.log'}"


def test_how_many_threads_compute_is_each_sides_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "ACCELERATE_MIXED_PRECISION", "SLIPWAY_FAILPOINT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("A_VARIABLE", "1")
    run(tmp_path, "import os; print(*sorted(os.environ))", 60.0)
    given = (tmp_path / "stdout.log").read_text().split()
    assert "A_VARIABLE" in given and not any("THREADS" in it or it.startswith("SLIPWAY_") for it in given)
    assert "ACCELERATE_MIXED_PRECISION" not in given
    assert "PYTHONDONTWRITEBYTECODE" not in given, "no side compiles its imports at each start"


def test_who_computes_is_seen_by_name_and_time(tmp_path: Path) -> None:
    """One that computes for half a second, below one that waits for it."""
    (tmp_path / "busy.py").write_text("import time\nwhile time.process_time() < 0.5: pass\ntime.sleep(5)\n")
    waits = "import subprocess, sys; subprocess.run([sys.executable, 'busy.py'])"
    lived = run(tmp_path, waits, 60.0)
    computed = lived.cpu.between(lived.began, lived.ended)
    assert 0.4 < computed["busy.py"] < 1.5 and computed["busy.py"] <= computed[ALL]
    assert lived.cpu.between(lived.ended, lived.ended + 1).get("busy.py", 0.0) == 0.0


def test_a_side_that_gets_nowhere_is_ended_and_said_so(tmp_path: Path) -> None:
    with pytest.raises(JobFailed, match="was not done after 0 s"):
        run(tmp_path, "import time; time.sleep(300)", 0.1)
