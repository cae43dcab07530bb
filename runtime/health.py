"""Health checks: tell whether a child is up, and has not frozen.

Neighbours: supervision.py asks twice a second. A check returns None when the child is healthy, else its
trouble in one sentence; it keeps its own state between two calls. No threads, standard library only.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from pathlib import Path
from typing import Protocol

from runtime.cpu_activity import CpuActivity
from runtime.shared import json_files, process_table

ANSWER_SECONDS = 5.0
# Longer than any single engine step or trainer kernel, far shorter than a person's patience.
STALL_SECONDS = 45.0
# As long as that a CPU may be at work on one token: a model that takes longer trains nothing anyway.
COMPUTING_SECONDS = 600.0
# An idle trainer uses a clock tick (10 ms) of processor time in less.
IDLE_CPU_SECONDS = 18.0
# As long as that a commit may wait for its disk: some GB over a slow network, and no disk that is gone.
DISK_SECONDS = 600.0


class HealthCheck(Protocol):
    """One child's health: awaiting it returns None if the child is healthy, else its trouble in one sentence.
    `reset` is called when the child is started again.

    `note`: a remark on a healthy child; `usual_seconds`: the longest answer while all was well.
    """

    note: str | None
    usual_seconds: float

    def reset(self) -> None: ...

    async def __call__(self, pid: int) -> str | None: ...


class HttpHealth:
    """GET `path` on the child's Unix socket answers 200."""

    note: str | None = None
    usual_seconds = 0.0

    def __init__(self, socket: Path, path: str) -> None:
        self._socket = socket
        self._path = path

    def reset(self) -> None:
        """Drop the dead child's socket, so that nothing connects to it meanwhile."""
        self._socket.unlink(missing_ok=True)

    async def __call__(self, pid: int) -> str | None:
        try:
            status, _ = await http_request(self._socket, "GET", self._path)
        except (OSError, TimeoutError, ValueError) as error:
            return f"{self._path}: {error or type(error).__name__}"
        return None if status == 200 else f"{self._path} answered {status}"


class EngineHealth(HttpHealth):
    """Health, and progress: vLLM's HTTP process answers `/health` also while its engine core stands still.

    When the token counters do not move between two looks, one token is asked of the base model: an idle
    engine gives it at once, a busy one moves its counters, a frozen one does neither for `STALL_SECONDS`.
    It is up once it has given its first token: kernels that are compiled for that one may take minutes.
    `on_cpu`: one step of a large model may take longer than that; it is waited for while it is at work.
    """

    # One token of the base model: no adapter to load, nothing recorded. Before rollouts, as every probe of a
    # publication (engine/command.py): a full queue is not a frozen engine.
    _ONE_TOKEN = {"model": "base", "prompt": "a", "max_tokens": 1, "temperature": 0, "priority": -1}
    POLL_SECONDS = 5.0  # twice, and a wait for the token: within a message's 30 s (test_bounds.py)
    _COUNTER = re.compile(rb"^vllm:(?:prompt|generation)_tokens_total\{[^}]*\} ([0-9.e+]+)", re.MULTILINE)

    def __init__(self, socket: Path, on_cpu: bool = False) -> None:
        super().__init__(socket, "/health")
        self._on_cpu = on_cpu
        self._token_at = math.inf
        self._looked_at = 0.0
        self._counters = b""
        self._gave_one = False

    def reset(self) -> None:
        super().reset()
        self._token_at = math.inf
        self._looked_at = 0.0
        self._counters = b""
        self._gave_one = False

    async def __call__(self, pid: int) -> str | None:
        trouble = await super().__call__(pid)
        if trouble or time.monotonic() - self._looked_at < self.POLL_SECONDS:
            return trouble
        if not self._gave_one:
            self._gave_one = await self._generates_a_token()
            self._token_at = time.monotonic()
            return None if self._gave_one else "no first token yet"
        begun, computing = time.monotonic(), CpuActivity(pid) if self._on_cpu else None
        if await self._made_progress() or await self._generates_a_token() or await self._made_progress():
            self._looked_at = self._token_at = time.monotonic()
            self.usual_seconds = max(self.usual_seconds, self._token_at - begun)
            return None
        silent_seconds = time.monotonic() - self._token_at
        if computing and silent_seconds < COMPUTING_SECONDS:
            return None
        return f"no token in {silent_seconds:.0f} s"

    async def _made_progress(self) -> bool:
        try:
            _, text = await http_request(self._socket, "GET", "/metrics")
        except (OSError, TimeoutError, ValueError):
            return False
        counters = b" ".join(self._COUNTER.findall(text))
        moved = counters != self._counters
        self._counters = counters
        return moved

    async def _generates_a_token(self) -> bool:
        try:
            status, _ = await http_request(
                self._socket, "POST", "/v1/completions", self._ONE_TOKEN, bound_seconds=STALL_SECONDS
            )
        except (OSError, TimeoutError, ValueError):
            return False
        return status == 200


class TrainerHealth:
    """The trainer is well if `trainer.json` has the state ready, and its processes use processor time: an
    idle trainer still polls. While it writes a checkpoint it may use none: it counts as alive while a disk
    takes the data, for `DISK_SECONDS`.
    """

    usual_seconds = 0.0

    def __init__(self, path: Path) -> None:
        self.note: str | None = None
        self._path = path
        self._cpu_seconds = 0.0
        self._moved_at = time.monotonic()
        self._wrote_at = -math.inf

    def reset(self) -> None:
        """Remove the dead trainer's last status."""
        self._path.unlink(missing_ok=True)
        self._moved_at = time.monotonic()
        self.note = None

    async def __call__(self, pid: int) -> str | None:
        try:
            status = json_files.read_json(self._path)
        except ValueError:
            status = None
        if status is None or status.get("state") not in ("ready", "training"):
            return "loading"
        self.note = status.get("error")
        return self._is_stalled([pid, *process_table.descendants(pid)])

    def _is_stalled(self, pids: list[int]) -> str | None:
        used, now = process_table.cpu_seconds(pids), time.monotonic()
        if used != self._cpu_seconds:
            self._cpu_seconds = used
            self._moved_at = now
        elif process_table.is_waiting_for_disk(pids):
            self._wrote_at = now
        still_seconds = now - self._moved_at
        if still_seconds < IDLE_CPU_SECONDS:
            return None
        if now - self._wrote_at >= IDLE_CPU_SECONDS:
            return f"no sign of life for {still_seconds:.0f} s"
        return None if still_seconds < DISK_SECONDS else f"waits for its disk for {still_seconds:.0f} s"


async def http_request(
    socket: Path, method: str, path: str, body: object = None, bound_seconds: float = ANSWER_SECONDS
) -> tuple[int, bytes]:
    """One HTTP request over a Unix socket: (status, body). Raises OSError, TimeoutError, ValueError."""
    content = b"" if body is None else json.dumps(body).encode()
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    async with asyncio.timeout(bound_seconds):
        reader, writer = await asyncio.open_unix_connection(str(socket))
        try:
            writer.write(head.encode() + content)
            answer = await reader.read()
        finally:
            writer.close()
    status_line, _, rest = answer.partition(b"\r\n")
    parts = status_line.split(b" ", 2)
    if len(parts) < 2 or not parts[1].isdigit():
        raise ValueError(f"not an HTTP answer: {status_line[:60]!r}")
    return int(parts[1]), rest.partition(b"\r\n\r\n")[2]
