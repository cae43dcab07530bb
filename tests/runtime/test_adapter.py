"""What the adapter is, and what it never is: the base, a constant, a second rounding, a random number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from runtime.engine.adapter_check import Pair, compare
from runtime.shared.projections import PROJECTIONS
from runtime.trainer.policy import Lora, Policy, PolicyError
from runtime.trainer.probe_logprobs import compute_probe_logprobs
from runtime.trainer.update import update
from tests.runtime.trainer_fixtures import (
    ALONE,
    LORA,
    SETTINGS,
    edited_model,
    fresh_policy,
    make_batch,
    measure,
    our_logits,
    peft_model,
    random_samples,
    settings_of,
    tiny_model,
    trained_policy,
)

TOKENS = torch.arange(3, 60)


def base_tensors(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: weight for name, weight in policy.model.named_parameters() if ".lora_" not in name}


def exported_config(folder: Path, **changes: Any) -> Path:
    """A trained adapter on disk, with changes in its adapter_config.json."""
    trained_policy().export_adapter(folder, "tiny")
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"target_modules": sorted(["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"])},
        {"target_modules": [*PROJECTIONS, "lm_head"]},
        {"target_modules": [*PROJECTIONS, "embed_tokens"]},
        {"target_modules": "all-linear"},
        {"trainable_token_indices": [0, 1]},
        {"target_parameters": ["mlp.experts"]},
    ],
    ids=lambda changes: str(changes)[:60],
)
def test_c14_an_adapter_on_the_head_or_the_embeddings_is_refused(changes: dict, tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="adapter"):
        fresh_policy().import_adapter(exported_config(tmp_path, **changes))


@pytest.mark.slow
def test_c14_neither_head_nor_embeddings_have_an_adapter_of_ours() -> None:
    policy = fresh_policy()
    assert len(policy.master_weights) == 2 * 7 * 2
    assert all(name.startswith("model.layers.") for name in policy.master_weights)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_c26_no_step_probe_or_swap_moves_a_bit_of_the_base(dtype: str, tmp_path: Path) -> None:
    policy = trained_policy(dtype)
    before = {name: weight.detach().clone() for name, weight in base_tensors(policy).items()}
    policy.export_adapter(tmp_path, "tiny")
    optimizer = torch.optim.AdamW(policy.master_weights.values(), lr=1e-2)
    for step in range(1, 9):
        update(policy, optimizer, make_batch(random_samples(step)), settings_of(kl_beta=0.1), ALONE)
        compute_probe_logprobs(policy, make_batch(random_samples(step)))
        if step % 3 == 0:
            policy.import_adapter(tmp_path)
    after = base_tensors(policy)
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    assert not any(weight.requires_grad for weight in after.values())


def test_c29_what_is_scored_for_the_ratio_is_scored_without_dropout(tmp_path: Path) -> None:
    """Whatever the model or an adapter says of dropout, two passes are the same number."""
    policy = fresh_policy(model=edited_model(tmp_path / "model", attention_dropout=0.5))
    policy.import_adapter(exported_config(tmp_path / "adapter", lora_dropout=0.5))
    policy.model.train()
    batch = make_batch(random_samples(29, groups=1, members=2))
    batch.temperature[:] = 1
    evidence = compute_probe_logprobs(policy, batch)
    order = sorted(range(batch.sequences), key=lambda sample: -int(batch.sampled[batch.span(sample)].sum()))
    for sample, start, end in zip(order, evidence["offsets"], evidence["offsets"][1:], strict=False):
        batch.logprobs[batch.span(sample)] = evidence["logprobs_policy"][start:end].numpy()
    batch.logprobs[batch.sampled == 0] = 0
    metrics = measure(policy, batch).metrics
    assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["kl_behaviour"] == pytest.approx(0, abs=1e-8)
    assert torch.equal(our_logits(policy, TOKENS), our_logits(policy, TOKENS))


# A scale that rounds, and one that bf16 cannot hold itself.
@pytest.mark.parametrize("lora", [LORA, Lora(rank=7, alpha=12.0)], ids=["3", "12 of 7"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_c31_the_policy_multiplies_with_what_the_engine_makes_of_the_file(
    dtype: str, lora: Lora, tmp_path: Path
) -> None:
    """By the comparison that judges a real engine: A and B rounded, then alpha / rank folded into B."""
    policy = trained_policy(dtype, lora)
    assert LORA.alpha / LORA.rank == 3
    optimizer = torch.optim.AdamW(policy.master_weights.values(), lr=1e-3)
    update(policy, optimizer, make_batch(random_samples(31)), SETTINGS, ALONE)
    policy.export_adapter(tmp_path, "tiny")
    working = dict(policy.model.named_parameters())
    held = {}
    for name in load_file(tmp_path / "adapter_model.safetensors"):
        module = name.removeprefix("base_model.model.").rpartition(".lora_")[0]
        pair = Pair(working[f"{module}.lora_a.weight"].detach(), working[f"{module}.lora_b.weight"].detach())
        held[module] = [pair]
    report = compare(held, tmp_path)
    assert (report["modules"], report["expected"], report["mismatched"]) == (14, 14, [])


def test_c32_tied_embeddings_are_one_matrix_here_and_none_in_the_file(tmp_path: Path) -> None:
    policy = trained_policy()
    optimizer = torch.optim.AdamW(policy.master_weights.values(), lr=1e-3)
    update(policy, optimizer, make_batch(random_samples(32)), SETTINGS, ALONE)
    names = [name for name in base_tensors(policy) if "embed" in name or "head" in name]
    assert names == ["model.embed_tokens.weight"], "a second matrix would drift apart when saved and loaded"
    model: Any = policy.model
    embeddings = model.get_input_embeddings()
    hidden = torch.randn(3, embeddings.weight.shape[1])
    assert torch.equal(policy.output(hidden), hidden @ embeddings.weight.T)
    policy.export_adapter(tmp_path, "tiny")
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert not [name for name in saved if "embed" in name or "lm_head" in name]
    served: Any = peft_model(tmp_path).get_base_model()
    assert served.lm_head.weight is served.model.embed_tokens.weight


def test_c32_a_tied_model_whose_file_holds_a_head_as_well_keeps_to_its_embeddings(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    folder = edited_model(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = torch.zeros_like(weights["model.embed_tokens.weight"])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(our_logits(fresh_policy(model=folder), TOKENS), our_logits(fresh_policy(), TOKENS))
    assert tiny_model() != folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_c30_a_swap_leaves_every_tensor_where_captured_code_reads_it(dtype: str, tmp_path: Path) -> None:
    policy = fresh_policy(dtype)
    trained_policy(dtype).export_adapter(tmp_path, "tiny")
    optimizer = torch.optim.AdamW(policy.master_weights.values(), lr=1e-2)
    places = {name: weight.data_ptr() for name, weight in policy.model.named_parameters()}
    update(policy, optimizer, make_batch(random_samples(30)), SETTINGS, ALONE)
    policy.import_adapter(tmp_path)
    policy.refresh_working_copy()
    assert {name: weight.data_ptr() for name, weight in policy.model.named_parameters()} == places


@pytest.mark.slow
def test_c30_compiled_code_follows_the_adapter_and_its_absence(tmp_path: Path) -> None:
    policy = fresh_policy()
    trained_policy().export_adapter(tmp_path, "tiny")
    ids, positions = TOKENS[None], torch.arange(len(TOKENS))[None]
    mask = torch.ones(1, len(TOKENS), len(TOKENS), dtype=torch.bool).tril()
    compiled = torch.compile(policy.hidden, backend="aot_eager")
    with torch.no_grad():
        fresh = compiled(ids, positions, mask)
        policy.import_adapter(tmp_path)
        trained = compiled(ids, positions, mask)
        torch.testing.assert_close(trained, policy.hidden(ids, positions, mask), atol=1e-5, rtol=1e-5)
        assert float((trained - fresh).abs().max()) > 0.1
        with policy.reference():
            torch.testing.assert_close(compiled(ids, positions, mask), fresh, atol=1e-5, rtol=1e-5)
