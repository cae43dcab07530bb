"""Admission by proof on a real engine: a random Qwen3 that both sides compute alike, and what they do not.

The mutations of C58 break the trainer's network; here its model's folder is broken, or its word.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.gateway.engines.engine_client import EngineClient
from runtime.gateway.engines.parity_check import ParityError, ParityReport, judge
from runtime.gateway.engines.version_check import AdapterVerifier, Measured, VerificationError
from runtime.shared import parity_check
from runtime.trainer.parity_export import export_parity_check
from runtime.trainer.policy import Lora
from tests.runtime.conftest import TINY_MODEL, EngineProcess, start_engine
from tests.runtime.trainer_fixtures import fresh_policy

pytestmark = pytest.mark.slow

LORA = Lora(rank=8, alpha=24.0)
SUBJECT = "of this test"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3: grouped heads wider than the model, norms of q and k that are not 1, a tied head."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("qwen3")
    torch.manual_seed(0)
    network = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=json.loads((TINY_MODEL / "config.json").read_text())["vocab_size"],
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            initializer_range=0.15,
            eos_token_id=2,
            bos_token_id=None,
            pad_token_id=0,
        )
    )
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if "norm" in name:
                weight.copy_(1 + 0.4 * torch.randn_like(weight))
    network.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY_MODEL / file, folder / file)
    return folder


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """The one engine of this file."""
    engine = start_engine(
        tmp_path_factory.mktemp("engine"), model_path=str(model), train={"lora": {"rank": LORA.rank}}
    )
    try:
        engine.wait_until_ready()
        yield engine
    finally:
        engine.end()


def trial(folder: Path, model: Path, lora: Lora = LORA) -> Path:
    """A run's folder with the trial that the trainer leaves there."""
    folder.mkdir(parents=True, exist_ok=True)
    export_parity_check(fresh_policy(lora=lora, model=model), folder, SUBJECT, model, "a-base")
    return folder


@pytest.fixture
def tried(served: EngineProcess, tmp_path: Path) -> Callable[..., ParityReport]:
    """Has the engine prove the trial of a trainer that works on this model; raises as the proof does."""

    def ask(model: Path, **more: Any) -> ParityReport:
        state = trial(tmp_path / "state", model, **more)
        found = parity_check.find(state, SUBJECT)
        assert found is not None

        async def scenario() -> Measured:
            client = EngineClient(served.socket)
            try:
                return await AdapterVerifier([client], "policy").measure(
                    f"admission-{found.adapter_sha256[:12]}", found
                )
            finally:
                assert await client.adapters() == [], "nothing of it stays loaded"
                await client.close()

        return judge(asyncio.run(asyncio.wait_for(scenario(), 120)), "float32")

    return ask


def test_c58_a_model_that_both_sides_compute_alike_is_admitted(tried, model: Path) -> None:
    proof = tried(model)
    assert proof.modules == 14 and proof.probe_tokens == 48
    assert max(proof.base.largest, proof.adapter.largest, proof.cached_error) < 2e-4
    assert proof.effect > 0.25 * proof.spread > 0.1, "the adapter does something"
    assert proof.effect_error < 1e-3


# ------------------------------------------------------------------ trainers that compute another model


def other_rotations(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] /= 4
    (folder / "config.json").write_text(json.dumps(config))


def a_head_of_its_own(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    tensors = load_file(folder / "model.safetensors")
    embeddings = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = torch.randn(embeddings.shape) * embeddings.std()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def no_norm_of_keys(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: torch.ones_like(it) if "k_norm" in name else it for name, it in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("breaks", [other_rotations, a_head_of_its_own, no_norm_of_keys])
def test_c58_a_model_that_the_trainer_computes_otherwise_is_refused_with_the_numbers(
    tried, model: Path, tmp_path: Path, breaks: Callable[[Path], None]
) -> None:
    shutil.copytree(model, tmp_path / "broken")
    breaks(tmp_path / "broken")
    with pytest.raises(ParityError, match="engine and trainer disagree") as refused:
        tried(tmp_path / "broken")
    proof = refused.value.proof
    assert f"differ by up to {proof.adapter.largest:.2g}" in str(refused.value)
    assert f"{proof.base.largest:.2g} under the base" in str(refused.value)
    assert proof.base.largest > 0.05 and proof.adapter.largest > 0.05


def test_c58_an_adapter_that_the_engine_cannot_load_is_refused_in_its_own_words(tried, model: Path) -> None:
    with pytest.raises(VerificationError, match=r"engine-0: /v1/load_lora_adapter: .*rank"):
        tried(model, lora=Lora(rank=64, alpha=64.0))


# ------------------------------------------------------------------ the trainer's side


def test_c58_a_trial_leaves_every_bit_of_the_policy_as_it_was(model: Path, tmp_path: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        policy = fresh_policy(dtype, LORA, model)
        weights: dict[str, torch.Tensor] = dict(policy.model.named_parameters())
        weights |= {f"master of {name}": master for name, master in policy.master_weights.items()}
        before = {name: weight.detach().clone() for name, weight in weights.items()}
        random = torch.get_rng_state()
        export_parity_check(policy, tmp_path, SUBJECT, model, "a-base")
        assert all(torch.equal(before[name], weight) for name, weight in weights.items())
        assert torch.equal(random, torch.get_rng_state()), "a replay has none, and draws the same"


def test_a_trial_is_always_the_same_and_reaches_past_a_window(model: Path, tmp_path: Path) -> None:
    found = []
    for name in ("one", "two"):
        trial(tmp_path / name, model)
        found.append((tmp_path / name / "admission/adapter/adapter_model.safetensors").read_bytes())
    assert found[0] == found[1]
    config = json.loads((model / "config.json").read_text())
    folder = shutil.copytree(model, tmp_path / "windowed")
    layers = ["sliding_attention", "full_attention"]
    windowed = config | {"use_sliding_window": True, "sliding_window": 200, "layer_types": layers}
    (folder / "config.json").write_text(json.dumps(windowed))
    probe = load_file(trial(tmp_path / "three", folder) / "admission" / "probe.safetensors")
    lengths = probe["offsets"].diff()
    assert lengths.tolist() == [40, 264] and int(probe["sampled"].sum()) == 48
