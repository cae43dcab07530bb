"""What the supervisor says of a child that runs but is not well, and when it ends it (G23)."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from runtime import health
from runtime.health import TrainerHealth
from runtime.shared import json_files, process_table
from runtime.shared.process_status import SupervisorStatus
from runtime.supervision import ChildSpec, RestartPolicy, Supervisor
from tests.support.waiting import wait_until, wait_until_async

pytestmark = pytest.mark.slow

CALM = ["sleep", "1000"]
# In its first life it does not hear SIGTERM, as a process that is frozen does not.
DEAF_ONCE = "[ -e heard ] && exec sleep 1000; touch heard; trap '' TERM; while :; do sleep 1000; done"


class Scripted:
    """A check that says what the test says."""

    def __init__(self) -> None:
        self.trouble: str | None = None
        self.note: str | None = None
        self.usual_seconds = 0.0
        # Without it no answer comes.
        self.answers = asyncio.Event()
        self.answers.set()

    def reset(self) -> None:
        self.trouble = None

    async def __call__(self, pid: int) -> str | None:
        await self.answers.wait()
        return self.trouble


def supervised(
    folder: Path,
    work: Callable[[Scripted, Callable[[], dict[str, Any]]], Awaitable[None]],
    command: list[str] = CALM,
    stop_seconds: float = 0.5,
) -> None:
    """Run `work` beside a real supervisor over one real child that is judged by a scripted check."""

    async def run() -> None:
        check = Scripted()
        spec = ChildSpec(
            "calm", command, folder / "calm.log", check, unresponsive_seconds=0.5, unhealthy_seconds=2.5,
            stop_seconds=stop_seconds,
        )  # fmt: skip
        stop = asyncio.Event()
        running = asyncio.create_task(
            Supervisor(folder, [spec], RestartPolicy(initial_backoff_seconds=0.01)).run(stop)
        )

        def said() -> dict[str, Any]:
            value = json.loads((folder / "supervisor.json").read_text())
            return value | value["children"][0] | {"whole": value["detail"]}

        try:
            await wait_until_async(
                lambda: (folder / "supervisor.json").exists() and said()["state"] == "ready"
            )
            await work(check, said)
        finally:
            stop.set()
            await running

    asyncio.run(run())


def test_g23_a_child_that_is_not_well_is_said_before_it_is_ended_and_forgotten_when_it_is_well(
    tmp_path: Path,
) -> None:
    async def work(check: Scripted, said: Callable[[], dict[str, Any]]) -> None:
        assert said()["phase"] == "ready" and said()["whole"] is None
        first = said()["pid"]
        check.trouble = "/healthz: TimeoutError"
        await wait_until_async(lambda: said()["detail"])
        assert said()["state"] == "ready" and said()["phase"] == "degraded"
        assert "calm not well for" in said()["whole"] and "/healthz: TimeoutError" in said()["whole"]
        check.trouble = None
        await wait_until_async(lambda: said()["detail"] is None)
        assert said()["phase"] == "ready" and (said()["pid"], said()["restarts"]) == (first, 0)
        check.trouble = "/healthz: TimeoutError"
        await wait_until_async(lambda: said()["restarts"] == 1 and said()["phase"] == "ready")
        assert said()["pid"] != first

    # Asked to end it would have its time, longer than this test waits; standing still it has none.
    deaf_once = f"cd {tmp_path}; {DEAF_ONCE}"
    supervised(tmp_path, work, ["sh", "-c", deaf_once], stop_seconds=60.0)


AT_WORK = ["sh", "-c", "while :; do :; done"]


@pytest.mark.parametrize(
    ("command", "words", "phase"),
    [(AT_WORK, "calm is slow: at work for", "ready"), (CALM, "calm has not answered for", "degraded")],
)
def test_n11_a_child_that_is_at_work_is_slow_and_one_that_is_not_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], words: str, phase: str
) -> None:
    monkeypatch.setattr("runtime.supervision.SLOW_SECONDS", 0.4)
    monkeypatch.setattr("runtime.supervision._STALL_POLL_SECONDS", 0.1)

    async def work(check: Scripted, said: Callable[[], dict[str, Any]]) -> None:
        first = said()["pid"]
        check.answers.clear()
        await wait_until_async(lambda: (said()["whole"] or "").startswith(words))
        assert (said()["state"], said()["phase"]) == ("ready", phase)
        check.answers.set()
        await wait_until_async(lambda: said()["detail"] is None)
        assert (said()["pid"], said()["restarts"], said()["phase"]) == (first, 0, "ready")

    supervised(tmp_path, work, command)


def test_what_a_child_that_is_well_has_to_say_is_said(tmp_path: Path) -> None:
    async def work(check: Scripted, said: Callable[[], dict[str, Any]]) -> None:
        check.note = "not committed yet: No space left on device"
        await wait_until_async(lambda: said()["phase"] == "degraded")
        assert said()["whole"] == f"calm {check.note}" and said()["restarts"] == 0

    supervised(tmp_path, work)


def test_a_full_disk_costs_the_children_no_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(check: Scripted, said: Callable[[], dict[str, Any]]) -> None:
        before, written = said()["pid"], json_files.write_json
        refused: list[str] = []

        def full(path: Path, value: Any, *, durable: bool = False) -> None:
            refused.append(path.name)
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(json_files, "write_json", full)
        check.note = "something"
        await wait_until_async(lambda: refused)
        monkeypatch.setattr(json_files, "write_json", written)
        check.note = "something else"
        await wait_until_async(lambda: said()["detail"] == "something else")
        assert said()["pid"] == before and said()["restarts"] == 0

    supervised(tmp_path, work)


def test_g23_a_supervisor_that_stands_still_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.shared.process_status.STALLED_SECONDS", 0.5)
    monkeypatch.setattr("runtime.supervision._HEARTBEAT_SECONDS", 0.1)
    machine = SupervisorStatus(tmp_path, 60.0)
    assert machine.silence() is None, "a gateway without a supervisor misses none"

    async def work(check: Scripted, said: Callable[[], dict[str, Any]]) -> None:
        written = (tmp_path / "supervisor.json").stat().st_mtime_ns
        await wait_until_async(lambda: (tmp_path / "supervisor.json").stat().st_mtime_ns != written)
        assert machine.silence() is None
        # From here on it does not come to its beat: the loop is ours, and stands.
        wait_until(machine.silence)
        assert "silent" in (machine.silence() or "")
        await wait_until_async(lambda: machine.silence() is None)

    supervised(tmp_path, work)


def test_g23_a_trainer_without_a_sign_of_life_is_not_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "IDLE_CPU_SECONDS", 0.3)
    said = tmp_path / "trainer.json"
    check = TrainerHealth(said)

    def asked(process: subprocess.Popen[bytes]) -> str | None:
        return asyncio.run(check(process.pid))

    with (
        subprocess.Popen(["sleep", "1000"]) as still,
        subprocess.Popen(["yes"], stdout=subprocess.DEVNULL) as busy,
    ):
        try:
            assert asked(still) == "loading"
            json_files.write_json(said, {"state": "training", "error": "not committed yet: full"})
            trouble = wait_until(lambda: asked(still))
            assert "no sign of life" in (trouble or "") and check.note == "not committed yet: full"
            assert asked(busy) is None, "processor time is a sign of life"
            check.reset()
            assert asked(still) == "loading"
        finally:
            still.kill()
            busy.kill()


# Waits in the kernel as a long fsync does, uninterruptibly, until somebody reads the FIFO: who spawns a
# process is not woken before that has opened its files.
_LONG_WRITE = """
import os, signal, sys
opened = [(os.POSIX_SPAWN_OPEN, 1, sys.argv[1], os.O_WRONLY, 0)]
os.posix_spawn("/bin/true", ["true"], {}, file_actions=opened)
signal.pause()
"""


def test_g23_a_trainer_in_a_long_write_is_well_until_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "IDLE_CPU_SECONDS", 0.3)
    fifo, said = tmp_path / "disk", tmp_path / "trainer.json"
    os.mkfifo(fifo)
    check = TrainerHealth(said)
    with subprocess.Popen([sys.executable, "-c", _LONG_WRITE, str(fifo)]) as writing:

        def asked() -> str | None:
            return asyncio.run(check(writing.pid))

        def longer_than_still_seconds() -> bool:
            assert asked() is None, "a slow disk is no frozen trainer"
            return time.monotonic() - began > 3 * health.IDLE_CPU_SECONDS

        try:
            json_files.write_json(said, {"state": "training"})
            wait_until(lambda: process_table.is_waiting_for_disk([writing.pid]))
            began = time.monotonic()
            wait_until(longer_than_still_seconds)
            monkeypatch.setattr(health, "DISK_SECONDS", 3 * health.IDLE_CPU_SECONDS)
            assert "waits for its disk" in (wait_until(asked, 30) or "")
            os.close(os.open(fifo, os.O_RDONLY))  # the disk has taken it
            wait_until(lambda: not process_table.is_waiting_for_disk([writing.pid]))
            assert "no sign of life" in (wait_until(lambda: _frozen(asked())) or "")
        finally:
            writing.kill()


def _frozen(trouble: str | None) -> str | None:
    """Only what is said of a process that waits for nothing."""
    return trouble if trouble and "no sign" in trouble else None
