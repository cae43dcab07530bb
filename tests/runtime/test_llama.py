"""Llama shapes against transformers and peft: rotation, tied and untied embeddings, heads of any width."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from runtime.trainer.policy import PolicyError
from runtime.trainer.update import update
from tests.runtime.trainer_fixtures import (
    ALONE,
    SETTINGS,
    fresh_policy,
    make_batch,
    measure,
    our_logits,
    peft_model,
    plain_model,
    random_samples,
    tiny_llama,
    trained_policy,
)

PLAIN_ROTATION = {"rope_type": "default", "rope_theta": 10_000.0}
SHAPES = {
    "3.2: tied, stretched": {},
    "3.1: untied, stretched": {"tie_word_embeddings": False},
    "2: untied, rotation as it was": {"tie_word_embeddings": False, "rope_parameters": PLAIN_ROTATION},
    "heads wider than the model": {"head_dim": 16, "num_key_value_heads": 4},
    "one key head": {"num_key_value_heads": 1, "head_dim": None},
}
# Four times the context before the stretch, so that slow, middle and fast rotations all differ.
TOKENS = torch.arange(280) % 90 + 3


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model(TOKENS[None]).logits[0]


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_logits_are_those_of_transformers_and_an_exported_adapter_is_exact_in_peft(
    changes: dict, tmp_path: Path
) -> None:
    folder = tiny_llama(tmp_path / "model", **changes)
    policy = trained_policy(model=folder)
    with policy.reference():
        base = our_logits(policy, TOKENS)
    torch.testing.assert_close(base, logits(plain_model(folder)), atol=1e-4, rtol=0)
    policy.export_adapter(tmp_path / "adapter", "tiny")
    ours = our_logits(policy, TOKENS)
    torch.testing.assert_close(ours, logits(peft_model(tmp_path / "adapter", folder)), atol=1e-4, rtol=0)
    assert float((ours - base).abs().max()) > 0.1


def test_a_config_as_transformers_4_wrote_it_means_the_same(tmp_path: Path) -> None:
    """Llama 3.2 on the hub: `rope_theta` at the top, the stretch in `rope_scaling`."""
    folder = tiny_llama(tmp_path / "model")
    expected = our_logits(trained_policy(model=folder), TOKENS)
    config = json.loads((folder / "config.json").read_text())
    scaling = config.pop("rope_parameters")
    older = {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
    (folder / "config.json").write_text(json.dumps(config | older))
    assert torch.equal(our_logits(trained_policy(model=folder), TOKENS), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_c12_llama_the_ratio_at_lag_zero_is_one(dtype: str, tmp_path: Path) -> None:
    """Far beyond the original context; in bf16 within what rounding does to single logprobs."""
    folder = tiny_llama(tmp_path / "model")
    policy = trained_policy(dtype, model=folder)
    batch = make_batch(random_samples(12, groups=2, members=3, prompt=200, completion=20))
    policy.export_adapter(tmp_path / "adapter", "tiny")
    model = peft_model(tmp_path / "adapter", folder).to(getattr(torch, dtype))
    for sample in range(batch.sequences):
        span = batch.span(sample)
        tokens = torch.from_numpy(batch.tokens[span]).long()
        with torch.no_grad():
            found = model(tokens[None]).logits[0].float() / float(batch.temperature[sample])
        batch.logprobs[span][1:] = found[:-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0].numpy()
    batch.logprobs[batch.sampled == 0] = 0
    metrics = measure(policy, batch).metrics
    assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-4 if dtype == "float32" else 0.01)
    assert 0 <= metrics["kl_behaviour"] < (1e-6 if dtype == "float32" else 1e-3)
    other = measure(fresh_policy(dtype, model=folder), batch).metrics
    assert other["kl_behaviour"] > 1e-2, "the adapter does nothing"


def test_a_step_trains_a_llama(tmp_path: Path) -> None:
    policy = fresh_policy(model=tiny_llama(tmp_path / "model", tie_word_embeddings=False))
    optimizer = torch.optim.AdamW(policy.master_weights.values(), lr=1e-2)
    batch = make_batch(random_samples(5))
    before = our_logits(policy, TOKENS)
    assert update(policy, optimizer, batch, SETTINGS, ALONE).metrics["updated"] == 1
    assert not torch.equal(our_logits(policy, TOKENS), before)
    with policy.reference():
        assert torch.equal(our_logits(policy, TOKENS), before)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"attention_bias": True}, "missing: .*q_proj.bias|missing: .*k_proj.bias"),
        ({"mlp_bias": True}, "missing: .*mlp"),
        ({"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
    ],
)
def test_a_llama_that_would_be_trained_as_another_is_refused(
    changes: dict, says: str, tmp_path: Path
) -> None:
    folder = tiny_llama(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(PolicyError, match=says):
        fresh_policy(model=folder)
