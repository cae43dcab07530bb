"""The base inside a real engine: its weights are the same bits whatever adapters come and go (C26)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.gateway.engines.engine_client import EngineClient
from tests.runtime.adapters import write_adapter
from tests.runtime.conftest import TINY_MODEL, EngineProcess

pytestmark = pytest.mark.slow

SEQUENCE = random.Random(26).choices(range(3, 800), k=40)


def test_c26_engine_no_swap_moves_a_bit_of_the_base(
    own_engine: Callable[..., EngineProcess], served_name: str, tmp_path: Path
) -> None:
    engine = own_engine(module="tests.runtime.hashed_engine")
    engine.wait_until_ready()

    async def scenario() -> None:
        client = EngineClient(engine.socket)
        before = await client._rpc("base_sha256")
        assert len(before) == 1
        assert len(before[0]) == 64
        for version in range(1, 7):
            name = f"{served_name}@v{version}"
            adapter = write_adapter(tmp_path / name, TINY_MODEL, seed=version)
            await client.load_adapter(name, adapter)
            assert (await client.verify_adapter(name, adapter)).exact
            await client.score(name, SEQUENCE)
            await client.unload_adapter(name)
            await client.score("base", SEQUENCE)
        assert await client._rpc("base_sha256") == before
        await client.close()

    asyncio.run(scenario())
