"""The policy against transformers and peft: same logits, an exact adapter file, refusals, the reference."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.gateway.engines.probe_comparison import LogprobProbe
from runtime.trainer import optimizer_state
from runtime.trainer.policy import Lora, Policy, PolicyError, build
from runtime.trainer.probe_logprobs import compute_probe_logprobs
from runtime.trainer.update import update
from tests.runtime.trainer_fixtures import (
    ALONE,
    LORA,
    SETTINGS,
    VOCABULARY,
    edited_model,
    fresh_policy,
    make_batch,
    measure,
    our_logits,
    peft_model,
    plain_model,
    random_samples,
    tiny_model,
    trained_policy,
)

TOKENS = torch.arange(3, 60)
WEIGHTS = "adapter_model.safetensors"


def exported(policy: Policy, folder: Path) -> Path:
    policy.export_adapter(folder, "tiny")
    return folder


@torch.no_grad()
def peft_logits(adapter: Path) -> torch.Tensor:
    return peft_model(adapter)(TOKENS[None]).logits[0]


def test_c12_the_ratio_at_lag_zero_is_one_with_an_adapter_that_does_something(tmp_path: Path) -> None:
    policy = trained_policy()
    batch = make_batch(random_samples(12, groups=4, members=4, turns=2))
    model = peft_model(exported(policy, tmp_path))
    for sample in range(batch.sequences):
        span = batch.span(sample)
        tokens = torch.from_numpy(batch.tokens[span]).long()
        with torch.no_grad():
            logits = model(tokens[None]).logits[0].float() / float(batch.temperature[sample])
        logprobs = logits[:-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        batch.logprobs[span][1:] = logprobs.numpy()
    batch.logprobs[batch.sampled == 0] = 0
    metrics = measure(policy, batch).metrics
    assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-3)
    assert 0 <= metrics["kl_behaviour"] < 1e-3
    assert metrics["clip_fraction"] == 0
    assert measure(fresh_policy(), batch).metrics["kl_behaviour"] > 1e-2, "the adapter does nothing"


def test_c23_every_module_is_exported_exactly_and_peft_computes_the_same(tmp_path: Path) -> None:
    policy = trained_policy()
    tensors = load_file(exported(policy, tmp_path) / WEIGHTS)
    assert len(tensors) == 2 * 7 * 2
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    model = peft_model(tmp_path)
    held = {
        name.replace(".default", ""): weight for name, weight in model.named_parameters() if "lora_" in name
    }
    assert held.keys() == tensors.keys()
    assert all(torch.equal(held[name], tensors[name]) for name in tensors)
    ours = our_logits(policy, TOKENS)
    torch.testing.assert_close(peft_logits(tmp_path), ours, atol=2e-4, rtol=1e-4)
    with policy.reference():
        assert float((our_logits(policy, TOKENS) - ours).abs().max()) > 0.1


def test_c23_a_file_with_gate_and_up_swapped_is_told_apart(tmp_path: Path) -> None:
    policy = trained_policy()
    tensors = load_file(exported(policy, tmp_path) / WEIGHTS)
    swap = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
    swapped = {
        ".".join(swap.get(part, part) for part in name.split(".")): tensor for name, tensor in tensors.items()
    }
    assert swapped.keys() == tensors.keys(), "names and shapes say nothing"
    assert [name for name in tensors if not torch.equal(swapped[name], tensors[name])]
    save_file(swapped, tmp_path / WEIGHTS, metadata={"format": "pt"})
    assert float((peft_logits(tmp_path) - our_logits(policy, TOKENS)).abs().max()) > 1e-2


def test_c24_a_rebuild_scales_nothing_twice(tmp_path: Path) -> None:
    policy = trained_policy()
    assert policy.lora.alpha != policy.lora.rank
    first = exported(policy, tmp_path / "first")
    again = fresh_policy()
    again.import_adapter(first)
    second = exported(again, tmp_path / "second")
    assert (second / WEIGHTS).read_bytes() == (first / WEIGHTS).read_bytes()
    assert torch.equal(our_logits(again, TOKENS), our_logits(policy, TOKENS))
    torch.testing.assert_close(peft_logits(second), our_logits(again, TOKENS), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_c28_the_reference_is_the_base_bit_for_bit(dtype: str) -> None:
    base = plain_model(tiny_model(), getattr(torch, dtype))
    mask = torch.ones(1, 1, len(TOKENS), len(TOKENS), dtype=torch.bool).tril()
    policy = trained_policy(dtype)
    with torch.no_grad():
        expected = base(TOKENS[None], attention_mask=mask).logits[0]
    with policy.reference():
        assert torch.equal(our_logits(policy, TOKENS), expected)
    assert not torch.equal(our_logits(policy, TOKENS), expected)


def test_a_fresh_adapter_is_the_base_and_depends_on_the_seed_alone() -> None:
    policy = fresh_policy()
    with policy.reference():
        base = our_logits(policy, TOKENS)
    assert torch.equal(our_logits(policy, TOKENS), base)
    torch.manual_seed(12345)
    again, other = fresh_policy(), build(tiny_model(), LORA, dtype="float32", device="cpu", seed=1)
    names = [name for name in policy.master_weights if ".lora_a." in name]
    assert all(torch.equal(again.master_weights[name], policy.master_weights[name]) for name in names)
    assert not any(torch.equal(other.master_weights[name], policy.master_weights[name]) for name in names)


def test_c31_a_bf16_base_works_with_the_rounded_fp32_masters(tmp_path: Path) -> None:
    policy = trained_policy("bfloat16")
    optimizer = torch.optim.AdamW(policy.master_weights.values(), lr=1e-4)
    batch = make_batch(random_samples(31))
    before = {name: master.detach().clone() for name, master in policy.master_weights.items()}
    update(policy, optimizer, batch, SETTINGS, ALONE)
    working = dict(policy.model.named_parameters())
    for name, master in policy.master_weights.items():
        assert master.dtype == torch.float32 and working[name].dtype == torch.bfloat16
        assert not torch.equal(master, before[name])
        scale = LORA.alpha / LORA.rank if ".lora_b." in name else 1
        assert torch.equal(working[name], master.bfloat16() * scale)
    tensors = load_file(exported(policy, tmp_path) / WEIGHTS)
    assert not all(torch.equal(tensor, tensor.bfloat16().float()) for tensor in tensors.values())
    again = fresh_policy("bfloat16")
    again.import_adapter(tmp_path)
    assert all(
        torch.equal(again.master_weights[name], master) for name, master in policy.master_weights.items()
    )
    assert torch.equal(our_logits(again, TOKENS), our_logits(policy, TOKENS))


def test_c31_micro_batches_of_a_bf16_base_add_up_in_fp32() -> None:
    policy, batch = trained_policy("bfloat16"), make_batch(random_samples(32, groups=8, prompt=30))
    whole = measure(policy, batch, SETTINGS.model_copy(update={"pack_tokens": 64})).gradient
    for value in whole.values():
        assert value.dtype == torch.float32
    # Of A: a gradient of B is scaled in fp32, which hides how it was added up.
    of_a = [value for name, value in whole.items() if ".lora_a." in name]
    assert not any(torch.equal(value, value.bfloat16().float()) for value in of_a)


def test_c43_two_steps_a_rebuild_and_two_steps_are_four_steps(tmp_path: Path) -> None:
    batches = [make_batch(random_samples(seed), step=seed) for seed in range(1, 5)]

    def start() -> tuple[Policy, torch.optim.Optimizer]:
        policy = fresh_policy()
        return policy, torch.optim.AdamW(policy.master_weights.values(), lr=1e-3, weight_decay=0.01)

    straight, optimizer = start()
    for batch in batches:
        update(straight, optimizer, batch, SETTINGS, ALONE)
    stopped, optimizer = start()
    for batch in batches[:2]:
        update(stopped, optimizer, batch, SETTINGS, ALONE)
    optimizer_state.save(tmp_path, stopped, optimizer)
    resumed, optimizer = start()
    resumed.import_adapter(exported(stopped, tmp_path / "adapter"))
    torch.manual_seed(99)
    optimizer_state.load(tmp_path, resumed, optimizer)
    for batch in batches[2:]:
        update(resumed, optimizer, batch, SETTINGS, ALONE)
    assert all(
        torch.equal(resumed.master_weights[name], master) for name, master in straight.master_weights.items()
    )


def test_c43_a_run_of_the_first_versions_goes_on_with_its_moments(tmp_path: Path) -> None:
    """Their optimizer.safetensors has torchtune's names."""
    theirs = {
        "self_attn.o_proj": "attn.output_proj",
        "mlp.gate_proj": "mlp.w1",
        "mlp.up_proj": "mlp.w3",
        "mlp.down_proj": "mlp.w2",
        "self_attn.": "attn.",
    }
    policy, batch = fresh_policy(), make_batch(random_samples(1))
    optimizer = torch.optim.AdamW(policy.master_weights.values(), lr=1e-3)
    update(policy, optimizer, batch, SETTINGS, ALONE)
    optimizer_state.save(tmp_path, policy, optimizer)
    file, old = tmp_path / "optimizer.safetensors", {}
    for name, tensor in load_file(file).items():
        named = name.removeprefix("model.")
        for ours, their in theirs.items():
            named = named.replace(ours, their)
        old[named] = tensor
    assert "layers.0.attn.output_proj.lora_a.weight/exp_avg" in old
    save_file(old, file)
    resumed = torch.optim.AdamW(policy.master_weights.values(), lr=1e-3)
    optimizer_state.load(tmp_path, policy, resumed)
    for master, moments in optimizer.state.items():
        assert all(torch.equal(resumed.state[master][name], value) for name, value in moments.items())


def test_the_probe_holds_whole_sequences_and_logprobs_of_both_policies() -> None:
    policy = trained_policy()
    batch = make_batch(random_samples(9, groups=2, completion=12))
    found = compute_probe_logprobs(policy, batch)
    starts = found["offsets"].tolist()
    assert len(starts) == 3 and starts[-1] == len(found["tokens"])
    for start, end in itertools.pairwise(starts):
        tokens = found["tokens"][start:end]
        expected = our_logits(policy, tokens).log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0]
        torch.testing.assert_close(found["logprobs_policy"][start + 1 : end], expected)
        assert found["logprobs_policy"][start] == found["logprobs_base"][start] == 0
    assert float((found["logprobs_policy"] - found["logprobs_base"]).abs().max()) > 0.1


def test_the_probe_ends_where_an_engine_is_asked_no_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, batch = trained_policy(), make_batch(random_samples(9, groups=1, completion=300))
    cut = compute_probe_logprobs(policy, batch)
    monkeypatch.setattr("runtime.trainer.probe_logprobs.PROBE_TOKENS", 10_000)
    whole = compute_probe_logprobs(policy, batch)
    assert len(cut["tokens"]) < len(whole["tokens"]) - 50
    read = []
    for name, found in (("cut", cut), ("whole", whole)):
        save_file(found, tmp_path / name)
        read.append(LogprobProbe.read(tmp_path / name, context_length=512))
    assert read[0].sequences == read[1].sequences
    assert read[0].counts.tolist() == read[1].counts.tolist()
    assert read[0].policy == pytest.approx(read[1].policy, abs=1e-5)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "its architecture MistralForCausalLM"),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "unexpected"),
        (
            {"model_type": "qwen4", "architectures": ["Qwen4ForCausalLM"]},
            "no language model of the type 'qwen4'",
        ),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized"),
        ({"architectures": None}, "architecture"),
        ({"architectures": ["Qwen2ForSequenceClassification"]}, "not a causal"),
        ({"model_type": "own", "auto_map": {"AutoModelForCausalLM": "modeling.Own"}}, "its own code"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"text_config": {}}, "other parts"),
        ({"head_dim": 24}, r"k_proj.bias is \[24\], not \[48\]"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "how long"),
        ({"num_hidden_layers": 3, "layer_types": None}, "missing"),
        ({"num_hidden_layers": 1, "layer_types": None}, "unexpected"),
        ({"tie_word_embeddings": False}, "missing"),
    ],
)
def test_a_model_that_would_be_trained_as_another_is_refused(
    changes: dict, says: str, tmp_path: Path
) -> None:
    folder = edited_model(tmp_path / "model", **changes)
    with pytest.raises(PolicyError, match=says):
        build(folder, LORA, dtype="float32", device="cpu", seed=0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"use_rslora": True}, "use_rslora"),
        ({"bias": "lora_only"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules"),
        ({"target_modules": ["q_proj", "v_proj", "lm_head"]}, "targets"),
        ({"rank_pattern": {"q_proj": 8}}, "rank per layer"),
        ({"alpha_pattern": {"q_proj": 8}}, "alpha per layer"),
        ({"r": 8}, "rank 8"),
        ({"lora_alpha": 4}, "alpha 4"),
    ],
)
def test_c27_an_adapter_that_means_something_else_is_refused(
    changes: dict, says: str, tmp_path: Path
) -> None:
    folder = exported(trained_policy(), tmp_path)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | changes))
    with pytest.raises(PolicyError, match=says):
        fresh_policy().import_adapter(folder)


def test_an_adapter_of_other_tensors_or_shapes_is_refused_before_anything_changes(tmp_path: Path) -> None:
    policy = trained_policy()
    folder = exported(policy, tmp_path)
    tensors = load_file(folder / WEIGHTS)
    name = sorted(tensors)[-1]
    for odd in (
        {other: tensor for other, tensor in tensors.items() if other != name},
        tensors | {name: tensors[name][:1].contiguous()},
        tensors | {f"{name}.more": tensors[name].clone()},
    ):
        save_file(odd, folder / WEIGHTS, metadata={"format": "pt"})
        untouched = fresh_policy()
        with pytest.raises(PolicyError):
            untouched.import_adapter(folder)
        assert all(
            torch.equal(m, fresh_policy().master_weights[n]) for n, m in untouched.master_weights.items()
        )


def test_the_adapters_rank_must_be_the_runs(tmp_path: Path) -> None:
    folder = exported(trained_policy(lora=Lora(8, 12.0)), tmp_path)
    with pytest.raises(PolicyError, match="rank 8"):
        fresh_policy().import_adapter(folder)


def test_tokens_the_model_has_no_place_for_are_refused() -> None:
    policy = fresh_policy()
    policy.check_tokens(VOCABULARY - 1, 512)
    with pytest.raises(PolicyError, match="vocabulary"):
        policy.check_tokens(VOCABULARY, 5)
    with pytest.raises(PolicyError, match="positions"):
        policy.check_tokens(1, 513)
