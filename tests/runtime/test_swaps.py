"""Swapping versions on a real engine: each answers with its own weights, and the base stays what it is."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

from runtime.gateway.engines.engine_client import EngineClient
from runtime.gateway.versions.versions import Versions
from tests.runtime.adapters import logprobs, write_adapter
from tests.runtime.conftest import RunningEngine
from tests.runtime.prefix_cache import answered

T = TypeVar("T")

SEQUENCE = random.Random(5).choices(range(3, 290), k=60)
# More than an engine has slots for (4), so that places are used again.
SWAPS = 9


def with_client(engine: RunningEngine, scenario: Callable[[EngineClient], Awaitable[T]]) -> T:
    async def body() -> T:
        client = EngineClient(engine.socket)
        try:
            return await asyncio.wait_for(scenario(client), 120)
        finally:
            await client.close()

    return asyncio.run(body())


async def swap(client: EngineClient, served_name: str, version: int, folder: Path) -> str:
    """Load a version, and forget the one four before it."""
    name = f"{served_name}@v{version}"
    await client.load_adapter(name, folder)
    if version > 4:
        await client.unload_adapter(f"{served_name}@v{version - 4}")
    return name


@pytest.mark.slow
def test_c26_however_many_versions_came_and_went_the_base_is_bit_for_bit_what_it_was(
    engine: RunningEngine, served_name: str, tmp_path: Path
) -> None:
    async def scenario(client: EngineClient) -> None:
        # On CPU vLLM packs the linear layers' weights away: the checksums are of the rest, the scores of all.
        before, base = await client._rpc("compute_weight_checksums"), await client.score("base", SEQUENCE)
        assert len(before[0]) > 20
        for version in range(1, SWAPS + 1):
            folder = write_adapter(tmp_path / str(version), engine.model, seed=version, size=3.0)
            name = await swap(client, served_name, version, folder)
            assert (await client.verify_adapter(name, folder)).exact
            await client.score(name, SEQUENCE)
            assert await client.score("base", SEQUENCE) == base
        assert await client._rpc("compute_weight_checksums") == before

    with_client(engine, scenario)


@pytest.mark.slow
def test_c30_every_version_answers_with_its_own_weights_also_where_another_was_before(
    engine: RunningEngine, served_name: str, tmp_path: Path
) -> None:
    async def scenario(client: EngineClient) -> list[list[float]]:
        said = []
        for version in range(1, SWAPS + 1):
            folder = write_adapter(tmp_path / str(version), engine.model, seed=version)
            said.append(await client.score(await swap(client, served_name, version, folder), SEQUENCE))
        return said

    said = np.array(with_client(engine, scenario))
    apart = np.abs(said[:, None] - said[None]).max(axis=2) + np.eye(SWAPS)
    assert apart.min() > 0.01
    for version in (1, SWAPS):
        own = logprobs(engine.model, tmp_path / str(version), SEQUENCE)
        assert np.abs(said[version - 1][1:] - own).max() < 1e-3


@pytest.mark.slow
def test_c13_after_a_swap_a_prefix_cache_hit_is_still_the_versions_own(
    engine: RunningEngine, served_name: str, tmp_path: Path
) -> None:
    prompt = random.Random(served_name).choices(range(3, 290), k=300)

    async def scenario(client: EngineClient) -> None:
        models = ["base"]
        for version in (1, 2):
            folder = write_adapter(tmp_path / str(version), engine.model, seed=version)
            models.insert(version - 1, await swap(client, served_name, version, folder))
        first, second, base = missed = [await answered(client, model, prompt) for model in models]
        assert [(it.looked_for, it.found) for it in missed] == [(len(prompt), 0)] * 3
        assert first.logprobs != second.logprobs != base.logprobs != first.logprobs
        for model, before in zip(models, missed, strict=True):
            hit = await answered(client, model, prompt)
            assert hit.looked_for == len(prompt) and hit.found >= 128
            assert hit.logprobs == pytest.approx(before.logprobs, abs=1e-4)

    with_client(engine, scenario)


def test_c35_a_version_that_a_request_holds_stays_however_many_are_newer(tmp_path: Path) -> None:
    versions = Versions(tmp_path / "serving.json", "policy", keep=2)
    versions.move(1, 1)
    held = versions.resolve("policy")
    versions.acquire(held.version)
    versions.acquire(held.version)
    for version in range(2, 6):
        versions.move(version, version)
    assert [version for version in range(1, 6) if versions.retire(version)] == [2, 3]
    versions.release(held.version)
    assert not versions.retire(1) and versions.resolve("policy@v1") == held
    versions.release(held.version)
    assert versions.retire(1)
