"""What a real engine says of its tokens, against transformers + peft on the same ids."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime.gateway.engines.engine_client import EngineClient
from runtime.gateway.engines.version_check import AdapterVerifier
from tests.runtime.adapters import change, commit, logprobs, write_adapter
from tests.runtime.conftest import RunningEngine
from tests.runtime.prefix_cache import Answered, answered

pytestmark = pytest.mark.slow

Tensors = dict[str, torch.Tensor]

MESSAGES = [{"role": "user", "content": "[[ ## phrase ## ]]\nthe red house and the black cat"}]


def ask(
    engine: RunningEngine, body: dict[str, Any], adapter: tuple[str, Path] | None = None
) -> dict[str, Any]:
    """One chat completion, with `adapter` (name, folder) loaded first."""

    async def scenario() -> dict[str, Any]:
        client = EngineClient(engine.socket)
        try:
            if adapter is not None and adapter[0] not in await client.adapters():
                await client.load_adapter(*adapter)
            full = {"messages": MESSAGES, "max_tokens": 48, "logprobs": True, "return_token_ids": True} | body
            async with client.post("/v1/chat/completions", json.dumps(full).encode()) as response:
                answer = await response.json()
                assert response.status == 200, answer
                return answer
        finally:
            await client.close()

    return asyncio.run(scenario())


def served_and_recomputed(
    engine: RunningEngine, answer: dict[str, Any], adapter: Path | None, temperature: float
) -> tuple[np.ndarray, np.ndarray]:
    """Logprobs of all choices' tokens: the engine's, and transformers' on the engine's ids."""
    served, recomputed = [], []
    prompt = answer["prompt_token_ids"]
    for choice in answer["choices"]:
        ids = choice["token_ids"]
        served += [token["logprob"] for token in choice["logprobs"]["content"]]
        own = logprobs(engine.model, adapter, prompt + ids, temperature)
        recomputed += own[len(prompt) - 1 :].tolist()
    return np.array(served), np.array(recomputed)


@pytest.mark.parametrize("temperature", [0.01, 0.6, 1.0, 1.3])
def test_c08_the_engines_logprobs_are_of_the_distribution_it_sampled_from(
    engine: RunningEngine, temperature: float
) -> None:
    answer = ask(engine, {"model": "base", "temperature": temperature, "n": 4})
    served, recomputed = served_and_recomputed(engine, answer, None, temperature)
    assert np.abs(served - recomputed).max() < 1e-3


def test_c08_the_client_asks_each_engine_for_its_mode(engine: RunningEngine) -> None:
    async def scenario() -> None:
        client = EngineClient(engine.socket)
        assert await client.health()
        (said,) = await client._rpc("sampling")
        assert said["logprobs_mode"] == "processed_logprobs"
        await client.close()

    asyncio.run(scenario())


def by_the_root_of_its_rank(_: Tensors, config: dict[str, Any]) -> None:
    config["use_rslora"] = True


def on_some_layers(tensors: Tensors, config: dict[str, Any]) -> None:
    """Of what the engine has fused, one projection and not its neighbours."""
    config["target_modules"] = ["q_proj", "v_proj", "up_proj"]
    for name in [name for name in tensors if name.split(".")[-3] not in config["target_modules"]]:
        del tensors[name]


@pytest.mark.parametrize(("edit", "modules"), [(by_the_root_of_its_rank, 28), (on_some_layers, 12)])
def test_c24_engine_an_adapter_of_another_scale_or_of_some_layers_is_proven(
    engine: RunningEngine, served_name: str, tmp_path: Path, edit: Any, modules: int
) -> None:
    """The scale is vLLM's own doing; peft is the other that says what it is."""
    whole = write_adapter(tmp_path / "whole", engine.model, seed=5, size=0.1, rank=8)
    adapter = change(whole, tmp_path / "adapter", edit)
    checkpoint = commit(
        tmp_path / "checkpoints", engine.model, adapter, version=1, sequence=list(range(5, 60)), prompt=20
    )

    async def scenario() -> None:
        client = EngineClient(engine.socket)
        verifier = AdapterVerifier([client], served_name)
        proof = await verifier.verify(checkpoint)
        await verifier.unload(1)
        await client.close()
        assert proof.modules == modules
        assert proof.max_error < 2e-4 and proof.effect > 1e-2

    asyncio.run(scenario())


@pytest.mark.parametrize("rank", [8, 16])
def test_c12_engine_ratio_is_one_with_a_non_zero_adapter(
    engine: RunningEngine, served_name: str, tmp_path: Path, rank: int
) -> None:
    """At lag 0 the trainer's probability of a sampled token over the engine's is 1."""
    adapter = write_adapter(tmp_path / "adapter", engine.model, seed=7, rank=rank)
    name = f"{served_name}@v1"
    answer = ask(engine, {"model": name, "temperature": 1.0, "n": 8}, (name, adapter))
    served, recomputed = served_and_recomputed(engine, answer, adapter, 1.0)
    difference = recomputed - served
    assert abs(np.exp(difference).mean() - 1) < 1e-3
    assert (np.exp(difference) - 1 - difference).mean() < 1e-3  # k3
    assert np.abs(difference).max() < 1e-3
    _, base = served_and_recomputed(engine, answer, None, 1.0)
    assert np.abs(base - served).max() > 0.1  # the adapter is really in it


def test_c12_engine_answers_of_several_adapters_and_the_base_at_once_are_each_their_own(
    engine: RunningEngine, served_name: str, tmp_path: Path
) -> None:
    adapters = {
        f"{served_name}@v{version}": write_adapter(tmp_path / str(version), engine.model, seed=version)
        for version in (1, 2, 3, 4)  # as many as there are slots: the last is in use
    }
    sequence = random.Random(3).choices(range(3, 800), k=60)

    async def scenario() -> dict[str, list[float]]:
        client = EngineClient(engine.socket)
        for name, folder in adapters.items():
            await client.load_adapter(name, folder)
        names = ["base", *adapters] * 3
        scores = await asyncio.gather(*(client.score(name, sequence) for name in names))
        await client.close()
        return dict(zip(names, scores, strict=True))

    for name, scores in asyncio.run(scenario()).items():
        own = logprobs(engine.model, adapters.get(name), sequence)
        assert np.abs(np.array(scores[1:]) - own).max() < 1e-3, name


@pytest.mark.parametrize("tokens", [100, 300])
def test_c13_a_prefix_cache_hit_gives_the_same_logprobs_as_a_miss(
    engine: RunningEngine, served_name: str, tokens: int
) -> None:
    prompt = random.Random(f"{served_name}-{tokens}").choices(range(3, 800), k=tokens)

    async def scenario() -> list[Answered]:
        client = EngineClient(engine.socket)
        try:
            return [await answered(client, "base", prompt) for _ in range(2)]
        finally:
            await client.close()

    missed, hit = asyncio.run(scenario())
    assert (missed.looked_for, missed.found) == (len(prompt), 0)
    # Whole blocks of 32; the last token is computed in any case.
    assert (hit.looked_for, hit.found) == (len(prompt), (tokens - 1) // 32 * 32)
    assert hit.logprobs == pytest.approx(missed.logprobs, abs=1e-4)
