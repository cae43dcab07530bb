"""What `launch` says of a run while its program works (launcher/run/work.py)."""

from __future__ import annotations

import io
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from launcher.console.output import Output
from launcher.records.lease import Lease, Limits
from launcher.results.program_progress import Progress
from launcher.run.runtime_monitor import RuntimeSnapshot
from launcher.run.work import WatchedRun, Work
from launcher.teardown import minder
from launcher.types.durability import DurabilityStatus
from runtime.shared.statuses import RuntimeStatus
from tests.support.waiting import wait_until

pytestmark = pytest.mark.process

TROUBLE = "step 7 is committed, but not published: policy@v7: engine-0: 4 tensors differ from the file"


def status(phase: str, detail: str | None = None, version: int = 6) -> RuntimeStatus:
    said = {"run_id": "r", "model": "m", "served_name": "policy", "version": version, "step": version}
    return RuntimeStatus.model_validate(said | {"phase": phase, "detail": detail})


def test_a_publication_that_failed_is_said_once_in_the_terminal_and_so_is_its_end() -> None:
    said = io.StringIO()
    watched = SimpleNamespace(
        label="x", begun_at=0.0, limits=Limits(0.0), monitor=None, progress=lambda: None
    )
    work = Work(cast(WatchedRun, watched), None, "", Output(stdout=said, stderr=said, environ={}))
    beats = [
        status("ready"),
        status("degraded", TROUBLE),
        status("degraded", TROUBLE),
        status("ready", None, 8),
    ]
    lines: list[Any] = []
    for one in beats:
        snapshot = RuntimeSnapshot(Lease(60, 0), status=one)
        work._report_detail(snapshot)
        lines.append(work._live(snapshot, 1.0).trouble)
    assert said.getvalue().splitlines() == [TROUBLE, "the newest step is being served again"]
    assert lines == [None, "the newest step is not being served", "the newest step is not being served", None]


def test_the_live_line_has_the_steps_of_its_program() -> None:
    progress = Progress(40, 33, None)
    watched = SimpleNamespace(label="x", begun_at=0.0, limits=Limits(0.0), progress=lambda: progress)
    work = Work(cast(WatchedRun, watched), None, "", Output(environ={}))
    live = work._live(RuntimeSnapshot(Lease(60, 0), status=status("ready", version=7)), 1.0)
    assert (live.step, live.steps, live.seconds_left) == (7, 40, None)


@pytest.mark.parametrize("where", ["the gateway's", "the trainer's"])
def test_n16_a_full_disk_of_the_machine_is_a_warning_once_and_so_is_its_end(where: str) -> None:
    said, full = io.StringIO(), "[Errno 28] No space left on device"
    monitor = SimpleNamespace(latest=lambda: snapshots.pop(0))
    watched = SimpleNamespace(
        label="x",
        begun_at=0.0,
        limits=Limits(0.0),
        monitor=monitor,
        durability=DurabilityStatus,
        progress=lambda: None,
    )
    work = Work(cast(WatchedRun, watched), None, "", Output(stdout=said, stderr=said, environ={}))
    child = {"name": "trainer", "state": "ready", "detail": f"not committed yet: {full}"}
    fields: dict[str, Any] = {"disk": full} if where == "the gateway's" else {"children": [child]}
    waits = RuntimeStatus.model_validate(status("ready").model_dump() | fields)
    statuses = (status("ready"), waits, waits, status("ready"), status("ready"))
    snapshots = [RuntimeSnapshot(Lease(60, 0), status=one) for one in statuses]
    lines = [work._live(snapshot, 1.0).trouble for snapshot in snapshots]
    snapshots.append(snapshots[-1])
    work.watch_until(lambda: not snapshots)
    _, first, second = said.getvalue().splitlines()  # the live line is drawn once
    assert first.startswith("the machine's disk takes nothing, so steps wait: ") and first.endswith(full)
    assert second == "the machine's disk takes data again: steps go on"
    assert lines == [None, *["the machine's disk takes nothing: steps wait"] * 2, None, None]


def test_n11_only_what_restarts_is_said_to_restart_and_what_is_slow_to_be_slow() -> None:
    watched = SimpleNamespace(
        label="x", begun_at=0.0, limits=Limits(0.0), monitor=None, progress=lambda: None
    )
    output = Output(stdout=io.StringIO(), stderr=io.StringIO(), environ={})
    work = Work(cast(WatchedRun, watched), None, "", output)

    def said(phase: str, state: str, detail: str | None) -> str | None:
        one = status(phase, detail and f"engine-0 {detail}").model_dump()
        one["children"] = [{"name": "engine-0", "state": state, "detail": detail}]
        return work._live(
            RuntimeSnapshot(Lease(60, 0), status=RuntimeStatus.model_validate(one)), 1.0
        ).trouble

    slow = "is slow: at work for 12 s without an answer"
    assert said("ready", "ready", slow) == f"engine-0 {slow}"
    assert said("degraded", "ready", "has not answered for 11 s") == "engine-0 has not answered for 11 s"
    assert said("degraded", "restarting", "ended with exit code 1") == "engine-0 is restarting"
    assert said("degraded", "ready", None) == "a part of the runtime is not ready"
    assert said("ready", "ready", None) is None


# What a program does at a signal that tells it to end: "saving" goes on until it is done.
_SAVING = """import pathlib, signal, sys, time
told = []
for number in map(int, sys.argv[2:]):
    signal.signal(number, lambda *_: told.append(1))
pathlib.Path("up").touch()
while not told:
    time.sleep(0.02)
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    time.sleep(0.1)
"""


def _saves(tmp_path: Path, seconds: float, grace: float, *told: signal.Signals) -> minder.Command:
    """A program that takes so long to save once one of these has come; any other ends it at once."""
    words = [str(seconds), *(str(int(number)) for number in told)]
    program = minder.start([sys.executable, "-c", _SAVING, *words], os.environ, tmp_path, grace)
    wait_until((tmp_path / "up").exists, what="the program runs")
    return program


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seconds", "grace", "told", "code"),
    [
        # Longer than the five seconds nobody has to ask for; a SIGTERM before its end would be its end.
        (7, 120.0, (signal.SIGINT,), 0),
        # It never ends by itself: SIGTERM after its grace does it, and where it is deaf what follows that.
        (600, 0.5, (signal.SIGINT,), 143),
        (600, 0.5, (signal.SIGINT, signal.SIGTERM), 137),
    ],
)
def test_g23_at_ctrl_c_a_program_has_its_grace_to_save_and_no_more(
    tmp_path: Path, seconds: float, grace: float, told: tuple[signal.Signals, ...], code: int
) -> None:
    program = _saves(tmp_path, seconds, grace, *told)
    watched = SimpleNamespace(grace_seconds=grace)
    Work(cast(WatchedRun, watched), program, "", Output(environ={}))._let_end(program)
    assert program.terminate() == code if program.poll() is None else program.poll() == code


@pytest.mark.slow
def test_g23_at_a_sigterm_a_program_has_its_grace_to_save(tmp_path: Path) -> None:
    """`launch down`, and a limit that is reached: it is told by SIGTERM alone."""
    assert _saves(tmp_path, 7, 120.0, signal.SIGTERM).terminate() == 0
