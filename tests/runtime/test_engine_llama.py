"""A Llama on a real engine: trained here, published there, and both say the same of its tokens."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from runtime.gateway.engines.engine_client import EngineClient
from runtime.gateway.engines.version_proof import Prover
from runtime.shared.batch import Batch
from runtime.shared.checkpoint import Checkpoint, CheckpointStore
from runtime.trainer.policy import Policy
from runtime.trainer.probe import make_probe
from runtime.trainer.update import update
from tests.runtime.conftest import TINY_MODEL, EngineProcess
from tests.runtime.trainer_fixtures import (
    ALONE,
    Sample,
    fresh_policy,
    make_batch,
    measure,
    settings_of,
    tiny_llama,
)

pytestmark = pytest.mark.slow

MESSAGES = [{"role": "user", "content": "the red house and the black cat, the old man and the sea, " * 3}]
SETTINGS = settings_of("dapo", overlong="keep", scale_rewards=False)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """Random weights of Llama 3.2's kind, with the tokenizer of the tiny model."""
    tokens = json.loads((TINY_MODEL / "config.json").read_text())["vocab_size"]
    folder = tiny_llama(
        tmp_path / "llama", tokens, hidden_size=64, num_attention_heads=2, num_key_value_heads=1,
        eos_token_id=2, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY_MODEL / file, folder / file)
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_c12_llama_what_the_engine_serves_is_what_the_trainer_trained(
    dtype: Literal["float32", "bfloat16"],
    own_engine: Callable[..., EngineProcess],
    llama: Path,
    tmp_path: Path,
) -> None:
    """In bf16 the weights of both sides are the same bits too; what they compute differs by its rounding."""
    exact = dtype == "float32"
    engine = own_engine(model_path=str(llama), dtype=dtype)
    policy = fresh_policy(dtype, model=llama)
    optimizer = torch.optim.AdamW(policy.masters.values(), lr=2e-2)

    async def scenario(client: EngineClient) -> None:
        prover = Prover([client], "policy", dtype)
        served = "base"
        for version in (1, 2):
            batch = await sampled(client, served, step=version)
            lag_zero = measure(policy, batch, SETTINGS).metrics
            assert lag_zero["ratio_mean"] == pytest.approx(1, abs=1e-3 if exact else 0.02), served
            assert lag_zero["kl_behaviour"] < (1e-6 if exact else 5e-3), served
            assert update(policy, optimizer, batch, SETTINGS, ALONE).metrics["updated"] == 1
            proof = await prover.prove(committed(policy, batch, llama, tmp_path / "checkpoints"))
            assert (proof.modules, proof.engines) == (14, 1)
            assert proof.max_error < 2e-4 or not exact
            assert proof.effect > 1e-2
            assert proof.effect_share == pytest.approx(1, abs=0.01 if exact else 0.3)
            served = proof.name

    engine.wait_until_ready()
    asyncio.run(with_client(engine, scenario))


async def with_client(engine: EngineProcess, scenario: Callable[[EngineClient], Awaitable[None]]) -> None:
    client = EngineClient(engine.socket)
    try:
        await asyncio.wait_for(scenario(client), 120)
    finally:
        await client.close()


async def sampled(client: EngineClient, model: str, step: int) -> Batch:
    """A group of answers as the engine recorded them."""
    body: dict[str, Any] = {"model": model, "messages": MESSAGES, "max_tokens": 40, "n": 6}
    body |= {"temperature": 0.9, "logprobs": True, "return_token_ids": True}
    answer = await client._json("POST", "/v1/chat/completions", body)
    prompt, choices = answer["prompt_token_ids"], answer["choices"]
    assert len(prompt) > 64, "rotations are stretched from there on"
    samples = [
        Sample([(prompt, False), (choice["token_ids"], True)], 0, float(place), temperature=0.9)
        for place, choice in enumerate(choices)
    ]
    batch = make_batch(samples, step=step)
    batch.logprobs[batch.sampled == 1] = np.concatenate(
        [[token["logprob"] for token in choice["logprobs"]["content"]] for choice in choices]
    )
    return batch


def committed(policy: Policy, batch: Batch, model: Path, root: Path) -> Checkpoint:
    """As the recipe commits a step."""

    def write(folder: Path) -> None:
        policy.export_adapter(folder / "adapter", str(model))
        save_file(make_probe(policy, batch), folder / "probe.safetensors")

    return CheckpointStore(root).commit(batch.step, batch.step, {}, write)
