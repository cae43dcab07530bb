"""Fixtures for the runtime's tests: the tiny model, a real engine, adapters and whole checkpoints.

The engine is started once per session, or taken from SLIPWAY_TEST_ENGINE_SOCKET when one runs already.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from runtime.gateway.engines.engine_client import EngineClient
from tests.support.waiting import wait_until

REPOSITORY = Path(__file__).resolve().parents[2]
TINY_MODEL = REPOSITORY / "runtime" / "tiny" / "model"
START_SECONDS = 240.0


@dataclass(frozen=True)
class RunningEngine:
    """A real engine serving the tiny model in fp32."""

    socket: Path
    model: Path

    @property
    def pid(self) -> int:
        """The process that listens on the socket."""
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(str(self.socket))
            size = struct.calcsize("3i")
            return struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[0]


def running_in_engine(engine: RunningEngine) -> float:
    """Requests the engine works on."""
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(engine.socket)), base_url="http://x") as http:
        lines = http.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running{"))


def is_healthy(door: Path) -> bool:
    """Whether an engine's `/health` is 200 at this moment."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(5)
        try:
            connection.connect(str(door))
            connection.sendall(b"GET /health HTTP/1.0\r\nHost: x\r\n\r\n")
            return connection.recv(64).split(b" ")[1:2] == [b"200"]
        except OSError:
            return False


@dataclass
class EngineProcess:
    """An engine of our own, as the supervisor would start it."""

    process: subprocess.Popen[bytes]
    socket: Path
    log: Path

    def answers(self) -> bool:
        """Whether `/health` is 200 at this moment."""
        return is_healthy(self.socket)

    def wait_until_ready(self) -> None:
        """Bounded; says what the engine said when it ends instead."""

        def ready() -> bool:
            assert self.process.poll() is None, self._said()
            return self.answers()

        wait_until(ready, START_SECONDS, self._said)

    def end(self) -> None:
        """Stop it, make sure, and remove its sockets."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(timeout=120)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(timeout=120)
        shutil.rmtree(self.socket.parent, ignore_errors=True)

    def _said(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]


def start_engine(folder: Path, module: str = "runtime.engine.server", **settings: object) -> EngineProcess:
    """Start an engine whose files are in `folder`; `settings` are RuntimeConfig's."""
    # A Unix socket's path is at most 107 bytes: pytest's own folders may be longer.
    sockets = Path(tempfile.mkdtemp(prefix="slip-"))
    config = {
        "run_id": "test",
        "model_path": str(TINY_MODEL),
        "state_dir": str(folder),
        "socket_dir": str(sockets),
        **settings,
    }
    (folder / "runtime.json").write_text(json.dumps(config))
    log = folder / "engine.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", module, "--config", str(folder / "runtime.json")],
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return EngineProcess(process, sockets / "engine-0.sock", log)


@pytest.fixture
def own_engine(tmp_path: Path) -> Iterator[Callable[..., EngineProcess]]:
    """Starts engines that a test may kill; whatever is left is ended with the test."""
    started: list[EngineProcess] = []

    def start(**settings: object) -> EngineProcess:
        folder = tmp_path / f"engine-{len(started)}"
        folder.mkdir()
        started.append(start_engine(folder, **settings))
        return started[-1]

    yield start
    for engine in started:
        engine.end()


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    """The shared engine. Leave it as you found it: unique adapter names, nothing killed."""
    if running := os.environ.get("SLIPWAY_TEST_ENGINE_SOCKET"):
        config = json.loads(Path(os.environ["SLIPWAY_TEST_ENGINE_CONFIG"]).read_text())
        yield RunningEngine(Path(running), Path(config["model_path"]))
        return
    own = start_engine(tmp_path_factory.mktemp("engine"))
    try:
        own.wait_until_ready()
        yield RunningEngine(own.socket, TINY_MODEL)
    finally:
        own.end()


def forget(engine: RunningEngine, served_name: str) -> None:
    """Leave the shared engine without the versions a gateway published under this name."""

    async def unload() -> None:
        client = EngineClient(engine.socket)
        for name in await client.adapters():
            if name.startswith(f"{served_name}@v"):
                await client.unload_adapter(name)
        await client.close()

    asyncio.run(unload())


@pytest.fixture
def served_name() -> str:
    """A policy's name no other test has used on the shared engine."""
    return f"policy-{uuid.uuid4().hex[:8]}"
