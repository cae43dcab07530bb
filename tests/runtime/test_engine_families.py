"""Each family on a real engine: trained here, published there, and both say the same of its tokens."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from runtime.gateway.engines.engine_client import EngineClient
from runtime.gateway.engines.parity_check import ParityError, judge
from runtime.gateway.engines.version_check import AdapterVerifier, Measured, VersionCheck
from runtime.shared import parity_check
from runtime.shared.batch import Batch
from runtime.shared.checkpoint import Checkpoint, CheckpointStore
from runtime.trainer.parity_export import export_parity_check
from runtime.trainer.policy import Policy
from runtime.trainer.probe_logprobs import compute_probe_logprobs
from runtime.trainer.update import update
from tests.runtime.engines import Engine
from tests.runtime.families import FAMILIES, HYBRIDS, MULTIMODAL_FAMILIES, WINDOW, served_folder
from tests.runtime.tampered_engine import SCORE, Body, Fault, TamperedEngine
from tests.runtime.trainer_fixtures import (
    ALONE,
    Sample,
    fresh_policy,
    make_batch,
    measure,
    settings_of,
)

Dtype = Literal["float32", "bfloat16"]

pytestmark = pytest.mark.slow

TEXT = "the red house and the black cat, the old man and the sea, " * 4
SETTINGS = settings_of("dapo", overlong="keep", scale_rewards=False)
ALWAYS: list[tuple[str, Dtype]] = [
    ("qwen3", "float32"),
    ("llama", "float32"),
    ("llama", "bfloat16"),
    ("gemma3-4b", "float32"),
    ("qwen3.5", "bfloat16"),
]
# What vLLM says of a shape that it does not serve.
UNSERVED = {"qwen2-window": "AssertionError: Sliding window for some but all layers is not supported"}
SERVED = [name for name in FAMILIES if name not in UNSERVED]
DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16")
REST = [(name, dtype) for name in SERVED for dtype in DTYPES if (name, dtype) not in ALWAYS]
# Of these vLLM has no fp32 without a GPU: "CPU GDN attention requires BF16".
_ONLY_BF16 = ("qwen3-next", "qwen3.5", "qwen3.5-moe")
REST += [
    (name, dtype)
    for name in (*HYBRIDS, *MULTIMODAL_FAMILIES)
    for dtype in DTYPES
    if (name, dtype) not in ALWAYS and not (dtype == "float32" and name in _ONLY_BF16)
]
# In bf16 a near tie sends a token to another expert here than there, and random experts have nothing in
# common: with all of them chosen there is no tie.
ALL_EXPERTS = {"num_experts_per_tok": 4}


@dataclass(frozen=True)
class Tolerance:
    """How far engine and trainer may be apart: fp32 computes the same, bf16 rounds in different places."""

    ratio: float
    kl: float
    error: float
    effect_share: float


WITHIN = {
    "float32": Tolerance(ratio=1e-3, kl=1e-6, error=2e-4, effect_share=0.01),
    "bfloat16": Tolerance(ratio=0.02, kl=5e-3, error=1.0, effect_share=0.3),
}


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("warm")
    one = Engine(folder, folder / "armed")
    yield one
    one.close()


@pytest.mark.parametrize(("name", "dtype"), ALWAYS)
def test_c12_what_the_engine_serves_is_what_the_trainer_trained_whatever_the_family(
    name: str, dtype: Dtype, warm: Engine, tmp_path: Path
) -> None:
    assert_served_as_trained(warm, name, dtype, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(("name", "dtype"), REST)
def test_c12_what_the_engine_serves_is_what_the_trainer_trained_in_the_other_families(
    name: str, dtype: Dtype, warm: Engine, tmp_path: Path
) -> None:
    assert_served_as_trained(warm, name, dtype, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", UNSERVED)
def test_what_the_engine_cannot_serve_it_says_at_its_start(name: str, warm: Engine, tmp_path: Path) -> None:
    model = served_folder(name, tmp_path / "model")
    with pytest.raises(AssertionError, match=UNSERVED[name]), warm.serving(tmp_path, model_path=str(model)):
        pass


def assert_served_as_trained(warm: Engine, name: str, dtype: Dtype, scratch: Path) -> None:
    """Two versions of a policy, each trained on what the one before it sampled, each proven."""
    experts = name in ("qwen3-moe", "gpt-oss", "qwen3-next", "qwen3.5-moe")
    changes = ALL_EXPERTS if dtype == "bfloat16" and experts else {}
    model = served_folder(name, scratch / "model", **changes)
    policy = fresh_policy(dtype, model=model)
    bounds = WITHIN[dtype]
    with warm.serving(scratch, model_path=str(model), dtype=dtype) as socket:
        if name in _ONLY_BF16:
            asyncio.run(answer_one_token(socket))
        proofs = asyncio.run(asyncio.wait_for(proven(socket, policy, model, dtype, bounds, scratch), 120))
        if name in MULTIMODAL_FAMILIES:
            assert_not_admitted_without_the_adapter(socket, model, dtype, scratch)
    for proof in proofs:
        assert (proof.modules, proof.engines) == (len(policy.master_weights) // 2, 1)
        assert proof.max_error < bounds.error
        assert proof.effect > 1e-2
        assert proof.effect_share == pytest.approx(1, abs=bounds.effect_share)
    write_log(name, dtype, proofs)


def assert_not_admitted_without_the_adapter(socket: Path, model: Path, dtype: Dtype, scratch: Path) -> None:
    """An engine that loads the adapter of such a model and computes without it, as vLLM has done."""
    export_parity_check(fresh_policy(dtype, model=model), scratch, "of this test", model, "a-base")
    exported = parity_check.find(scratch, "of this test")
    assert exported is not None

    async def measured(engine: Path) -> Measured:
        client = EngineClient(engine)
        try:
            return await AdapterVerifier([client], "policy", dtype).measure("admission", exported)
        finally:
            await client.close()

    def without_adapter(body: Body) -> Body:
        return body | {"model": "base"}

    judge(asyncio.run(measured(socket)), dtype)
    door = TamperedEngine(socket)
    try:
        door.fault = Fault(rewrite={SCORE: without_adapter})
        with pytest.raises(ParityError, match="engine and trainer disagree"):
            judge(asyncio.run(measured(door.socket)), dtype)
    finally:
        door.close()


async def answer_one_token(socket: Path) -> None:
    """A prompt of one token, at which vLLM's kernel ends the engine where it has the native path."""
    client = EngineClient(socket)
    try:
        await client.score_next("base", [5], 6)
    finally:
        await client.close()


async def proven(
    socket: Path, policy: Policy, model: Path, dtype: Dtype, bounds: Tolerance, scratch: Path
) -> list[VersionCheck]:
    client = EngineClient(socket)
    verifier = AdapterVerifier([client], "policy", dtype)
    optimizer = torch.optim.AdamW(policy.master_weights.values(), lr=2e-2)
    found: list[VersionCheck] = []
    served = "base"
    try:
        for version in (1, 2):
            batch = await sampled(client, served, step=version)
            lag_zero = measure(policy, batch, SETTINGS).metrics
            assert lag_zero["ratio_mean"] == pytest.approx(1, abs=bounds.ratio), served
            assert lag_zero["kl_behaviour"] < bounds.kl, served
            assert update(policy, optimizer, batch, SETTINGS, ALONE).metrics["updated"] == 1
            found.append(await verifier.verify(committed(policy, batch, model, scratch / "checkpoints")))
            served = found[-1].name
    finally:
        await client.close()
    return found


async def sampled(client: EngineClient, model: str, step: int) -> Batch:
    """A group of answers as the engine recorded them."""
    prompt = await client.tokenize(TEXT)
    assert len(prompt) > 64, "rotations are stretched from there on"
    assert len(prompt) > 2 * WINDOW, "answers do not see where it begins"
    body: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": 40, "n": 6}
    body |= {"temperature": 0.9, "logprobs": 0, "return_token_ids": True}
    choices = (await client._json("POST", "/v1/completions", body))["choices"]
    samples = [
        Sample([(prompt, False), (choice["token_ids"], True)], 0, float(place), temperature=0.9)
        for place, choice in enumerate(choices)
    ]
    batch = make_batch(samples, step=step)
    batch.logprobs[batch.sampled == 1] = np.concatenate(
        [choice["logprobs"]["token_logprobs"] for choice in choices]
    )
    return batch


def committed(policy: Policy, batch: Batch, model: Path, root: Path) -> Checkpoint:
    """As the recipe commits a step."""

    def write(folder: Path) -> None:
        policy.export_adapter(folder / "adapter", str(model))
        save_file(compute_probe_logprobs(policy, batch), folder / "probe.safetensors")

    return CheckpointStore(root).commit(batch.step, batch.step, {}, write)


def write_log(name: str, dtype: str, proofs: list[VersionCheck]) -> None:
    """A line for tests/bench/RESULTS.md, where SLIPWAY_FAMILIES_LOG names a file."""
    if not (log := os.environ.get("SLIPWAY_FAMILIES_LOG")):
        return
    worst = max(proofs, key=lambda proof: proof.max_error)
    line = {
        "family": name,
        "dtype": dtype,
        "modules": worst.modules,
        "tokens": sum(proof.probe_tokens for proof in proofs),
        "max_error": worst.max_error,
        "mean_error": worst.mean_error,
        "effect": worst.effect,
        "effect_share": worst.effect_share,
    }
    with Path(log).open("a") as file:
        file.write(json.dumps(line) + "\n")
