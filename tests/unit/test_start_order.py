"""What comes up before what: an engine without a token is not ready, a trainer on its GPU waits for it."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime import gpus, health
from runtime.__main__ import children
from runtime.health import EngineHealth
from runtime.shared.runtime_config import RuntimeConfig
from runtime.supervision import ChildSpec, Supervisor
from tests.support.waiting import wait_until_async

pytestmark = pytest.mark.process


class Scripted:
    """A check that says what the test says."""

    note: str | None = None

    def __init__(self, trouble: str | None = None) -> None:
        self.trouble = trouble

    def reset(self) -> None:
        """Nothing is remembered."""

    async def __call__(self, pid: int) -> str | None:
        return self.trouble


# ------------------------------------------------------------------ who waits for whom


def config(folder: Path, **changes: Any) -> RuntimeConfig:
    places = {"state_dir": str(folder), "socket_dir": str(folder), "model_path": "m", "run_id": "r"}
    return RuntimeConfig.model_validate({**places, "device": "cuda", **changes})


@pytest.mark.parametrize(
    ("visible", "changes", "waits_for"),
    [
        ("GPU-1", {}, {"engine-0"}),
        ("0,1", {}, set()),
        ("0,1,2,3", {"train_processes": 2, "engines": 2}, set()),
        ("0,1", {"train_processes": 2, "engines": 2}, {"engine-0", "engine-1"}),
        ("0,1", {"train_processes": 1, "engines": 2}, {"engine-1"}),
        ("0", {"engine": {"kv_cache_gib": 1.5}}, set()),
        ("0", {"device": "cpu"}, set()),
    ],
)
def test_a_trainer_waits_for_the_engines_on_its_gpus_alone(
    visible: str,
    changes: dict[str, Any],
    waits_for: set[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(gpus.VISIBLE, visible)
    specs = {
        spec.name: spec for spec in children(tmp_path / "runtime.json", config(tmp_path, **changes), b"t")
    }
    assert specs["trainer"].starts_after == waits_for
    assert all(not spec.starts_after for name, spec in specs.items() if name != "trainer")


def test_who_waits_is_started_when_the_others_are_ready_and_no_more_waits_when_they_start_again(
    tmp_path: Path,
) -> None:
    engine = Scripted("loading")
    specs = [
        ChildSpec(
            "trainer", ["sleep", "1000"], tmp_path / "t", Scripted(), starts_after=frozenset({"engine-0"})
        ),
        ChildSpec("engine-0", ["sleep", "1000"], tmp_path / "e", engine, unhealthy_seconds=0.2),
    ]

    def said(name: str) -> dict[str, Any]:
        found = json.loads((tmp_path / "supervisor.json").read_text())
        return next(child for child in found["children"] if child["name"] == name)

    async def run() -> None:
        stop = asyncio.Event()
        running = asyncio.create_task(Supervisor(tmp_path, specs).run(stop))
        try:
            await wait_until_async(
                lambda: (tmp_path / "supervisor.json").exists() and said("engine-0")["pid"] is not None
            )
            assert (said("trainer")["state"], said("trainer")["pid"]) == ("starting", None)
            assert not (tmp_path / "t").exists(), "nothing of it was started"
            engine.trouble = None
            await wait_until_async(lambda: said("trainer")["state"] == "ready")
            trainer = said("trainer")["pid"]
            engine.trouble = "frozen"
            await wait_until_async(lambda: said("engine-0")["restarts"] == 1)
            assert said("trainer")["pid"] == trainer
        finally:
            stop.set()
            await running
        assert said("trainer")["state"] == said("engine-0")["state"] == "stopped"

    asyncio.run(run())


def test_what_still_waits_when_all_ends_was_never_there(tmp_path: Path) -> None:
    specs = [
        ChildSpec(
            "trainer", ["sleep", "1000"], tmp_path / "t", Scripted(), starts_after=frozenset({"engine-0"})
        ),
        ChildSpec("engine-0", ["sleep", "1000"], tmp_path / "e", Scripted("loading")),
    ]

    async def run() -> int:
        stop = asyncio.Event()
        running = asyncio.create_task(Supervisor(tmp_path, specs).run(stop))
        await wait_until_async(lambda: (tmp_path / "e").exists())
        stop.set()
        return await running

    assert asyncio.run(run()) == 0
    assert not (tmp_path / "t").exists()


# ------------------------------------------------------------------ an engine's first token


class PlayedEngine:
    """vLLM's HTTP side, up at once; tokens come when `gives` is set, and its counters move with them."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.gives = asyncio.Event()
        self.tokens = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readline()).split()[1]
        text = ""
        if path == b"/v1/completions":
            await self.gives.wait()
            self.tokens += 1
        elif path == b"/metrics":
            text = f'vllm:generation_tokens_total{{engine="0"}} {self.tokens}.0\n'
        writer.write(f"HTTP/1.1 200 OK\r\n\r\n{text}".encode())
        await writer.drain()
        writer.close()


@pytest.fixture
def socket() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="slip-") as folder:
        yield Path(folder) / "engine-0.sock"


def test_g23_an_engine_is_up_once_it_has_given_a_token_however_long_its_first_takes(
    socket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "STALL_SECONDS", 0.2)
    monkeypatch.setattr(EngineHealth, "POLL_SECONDS", 0.0)

    async def run() -> None:
        engine, check = PlayedEngine(socket), EngineHealth(socket)
        server = await asyncio.start_unix_server(engine.answer, str(socket))
        async with server:
            for _ in range(3):
                assert await check(1) == "no first token yet"
            engine.gives.set()
            assert await check(1) is None
            assert await check(1) is None, "its counters have moved"
            engine.gives.clear()
            assert await check(1) == "no token in 0 s", "it has stood still since"
            engine.gives.set()
            assert await check(1) is None
            check.reset()
            engine.gives.clear()
            assert not socket.exists()
        async with await asyncio.start_unix_server(engine.answer, str(socket)):
            assert await check(1) == "no first token yet", "another process, with kernels of its own"

    asyncio.run(run())
