"""runtime/shared/memory and model_shape: what a run takes of its GPUs, what is chosen, what cannot fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.models import known_models
from runtime.engine import command
from runtime.shared import gpu_memory
from runtime.shared.language_model import language_model
from runtime.shared.memory import assumptions, engine, planning, suggestions, trainer
from runtime.shared.memory.activations import ActivationModel
from runtime.shared.memory.memory_item import total
from runtime.shared.memory.planning import MachineGpus, MemoryPlan, Overrides, plan, usable
from runtime.shared.model_shape import ModelShape, shape
from runtime.shared.projections import PROJECTIONS
from tests.bench import memory

KNOWN = json.loads((Path(known_models.__file__).parent / "known_models.json").read_text())["models"]
# What the models' own cards say, in billions.
PARAMETERS = {
    "Qwen/Qwen2.5-0.5B-Instruct": 0.49, "Qwen/Qwen2.5-1.5B-Instruct": 1.54, "Qwen/Qwen2.5-3B-Instruct": 3.09,
    "Qwen/Qwen2.5-7B-Instruct": 7.61, "Qwen/Qwen2.5-14B-Instruct": 14.7, "Qwen/Qwen2.5-32B-Instruct": 32.5,
    "Qwen/Qwen3-0.6B": 0.6, "Qwen/Qwen3-1.7B": 1.7, "Qwen/Qwen3-4B": 4.0, "Qwen/Qwen3-8B": 8.2,
    "Qwen/Qwen3-14B": 14.8, "Qwen/Qwen3-32B": 32.8, "Qwen/Qwen3-30B-A3B": 30.5,
    "meta-llama/Llama-3.2-1B-Instruct": 1.23, "meta-llama/Llama-3.2-3B-Instruct": 3.21,
    "meta-llama/Llama-3.1-8B-Instruct": 8.03, "NousResearch/Hermes-2-Theta-Llama-3-8B": 8.03,
    "mistralai/Mistral-7B-Instruct-v0.3": 7.25,
    "microsoft/phi-4": 14.7, "microsoft/Phi-4-mini-instruct": 3.84, "google/gemma-3-1b-it": 1.0,
    "allenai/OLMo-2-1124-7B-Instruct": 7.3, "ibm-granite/granite-3.3-8b-instruct": 8.17,
    "HuggingFaceTB/SmolLM2-135M-Instruct": 0.135, "HuggingFaceTB/SmolLM3-3B": 3.08,
    "openai/gpt-oss-20b": 20.9,
    # Without what sees: Google's report lists it apart, Qwen's cards count the rest.
    "google/gemma-3-4b-it": 3.88, "google/gemma-3-12b-it": 11.77, "google/gemma-3-27b-it": 27.0,
    "Qwen/Qwen3.5-9B": 9.0, "Qwen/Qwen3.5-27B": 27.0, "Qwen/Qwen3.5-35B-A3B": 35.0,
}  # fmt: skip
ONE = MachineGpus("H100", 1, 1, 1)
FOUR = MachineGpus("H100", 4, 1, 3)


def known(model: str) -> ModelShape:
    found = shape(language_model(known_models.config_of(model) or {}))
    assert found is not None
    return found


def planned(model: str, machine: MachineGpus = ONE, **wishes: Any) -> MemoryPlan:
    found = plan(known(model), machine, Overrides(**wishes))
    assert found is not None
    return found


# ------------------------------------------------------------------ shapes


def test_layers_that_pass_a_state_keep_it_in_place_of_keys_and_values() -> None:
    """Qwen3.5-9B: every fourth layer has attention, the others a state of 32 × 128 × 128 in fp32. A block of
    vLLM's holds a page of eight layers: as many tokens, by sixteen, as have room where a state has."""
    found = known("Qwen/Qwen3.5-9B")
    state = 32 * 128 * 128 * 4 + (2 * 16 * 128 + 32 * 128) * 3 * 2
    token = 2 * 4 * 256 * 2
    block = 528 * token * 8
    assert 512 * token < state < 528 * token
    assert engine.cache_bytes(found, 528, 2) == (1 + 3 * 2) * block
    assert engine.cache_bytes(found, 529, 2) == (2 + 3 * 2) * block
    assert engine.max_sequences(found, 10 * block + 1, 2) == 10
    assert engine.max_sequences(known("Qwen/Qwen3-8B"), 1, 2) is None
    adapted = {(layer % 4 == 3, linear.name) for layer, linear in found.with_lora()}
    assert {name for attends, name in adapted if not attends} == {"gate_proj", "up_proj", "down_proj"}
    assert len(adapted) == 10 and found.of_layer(3)[0].out == 2 * 16 * 256, "queries and their gate"


@pytest.mark.parametrize("model", [name for name in KNOWN if "Qwen3.5" in name])
@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_an_engine_of_a_hybrid_takes_no_more_sequences_than_its_cache_has_blocks(
    model: str, gpus: int
) -> None:
    """Else vLLM does not start: "max_num_seqs exceeds available Mamba cache blocks"."""
    machine = MachineGpus("H100", gpus, 1, max(1, gpus - 1))
    found = planned(model, machine)
    if not found.fits:
        assert found.short
        return
    cache = next(line.size for line in found.engine if line.name == "cache")
    places = found.engine_places + 4 if found.engine_places else 1024
    assert places <= (engine.max_sequences(known(model), cache, 2) or 0)
    refused = planned(model, machine, max_num_seqs=5000)
    assert refused.short is not None


def test_more_sequences_than_blocks_are_refused_with_both_numbers() -> None:
    refused = planned("Qwen/Qwen3.5-9B", FOUR, max_num_seqs=3000)
    assert refused.short is not None
    assert "blocks for states, fewer than the 3004 sequences" in refused.short


def test_every_known_model_has_what_its_card_says_here() -> None:
    assert set(KNOWN) == set(PARAMETERS)


@pytest.mark.parametrize("model", sorted(KNOWN))
def test_a_known_model_has_as_many_parameters_as_its_card_says(model: str) -> None:
    assert known(model).weights / 1e9 == pytest.approx(PARAMETERS[model], rel=0.013)
    assert KNOWN[model]["source"]


def test_an_adapter_on_every_linear_layer_is_as_large_as_a_real_one() -> None:
    """Of rank 16 on Qwen2.5-0.5B: 8.8 M numbers."""
    assert known("Qwen/Qwen2.5-0.5B-Instruct").adapter_weights(16) == 8_798_208
    attention = known("Qwen/Qwen3-30B-A3B")
    assert {linear.name for _, linear in attention.with_lora()} == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_a_shape_reads_what_its_family_says_of_windows_heads_and_fused_layers() -> None:
    gemma = known("google/gemma-3-1b-it")
    assert gemma.windows[:6] == (512, 512, 512, 512, 512, None) and gemma.norms == 4 and gemma.query_key_norms
    assert (gemma.head_width, gemma.query, gemma.key_value) == (256, 1024, 256)
    phi = known("microsoft/phi-4")
    assert [linear.name for linear in phi.linears] == ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
    assert phi.linears[0].out == phi.query + 2 * phi.key_value
    qwen = {"sliding_window": 4096, "use_sliding_window": False}
    assert set(shape_of(model_type="qwen2", **qwen).windows) == {None}
    assert set(shape_of(model_type="mistral", sliding_window=4096).windows) == {4096}
    assert known("microsoft/Phi-4-mini-instruct").positions == 4096, "beyond it longrope rotates otherwise"


def shape_of(**said: Any) -> ModelShape:
    config = {
        "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
        "num_hidden_layers": 3, "vocab_size": 320,
    } | said  # fmt: skip
    found = shape(config)
    assert found is not None
    return found


def test_a_config_that_does_not_say_its_widths_has_no_shape() -> None:
    assert shape({"model_type": "qwen3"}) is None
    assert shape({}) is None


def test_some_layers_of_a_mixture_may_have_no_experts() -> None:
    mixed = shape_of(
        model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        mlp_only_layers=[0],
    )  # fmt: skip
    assert mixed.dense == frozenset({0})
    assert len(mixed.of_layer(0)) == 7 and len(mixed.of_layer(1)) == 4
    assert mixed.expert_weights == 2 * 4 * 3 * 64 * 32


# ------------------------------------------------------------------ bytes


def test_what_is_kept_grows_with_the_row_and_shrinks_to_inputs_with_checkpointing() -> None:
    """Qwen2.5-1.5B: some 100 KB a token and layer without, each layer's input with it."""
    model = known("Qwen/Qwen2.5-1.5B-Instruct")
    kept = ActivationModel(model, 16, PROJECTIONS)
    whole, inputs = kept.row(4096, checkpointing=False), kept.row(4096, checkpointing=True)
    assert 95_000 < whole / 4096 / model.layers < 110_000
    assert inputs == pytest.approx(4096 * (model.layers * model.hidden * 2 + 4 * model.hidden), rel=0.01)
    assert kept.row(8192, checkpointing=False) == 2 * whole, "nothing of it is a square of the row"


def test_a_mask_of_whole_rows_is_a_square_of_the_row_in_every_layer() -> None:
    model = known("Qwen/Qwen3-0.6B")
    without, with_it = (ActivationModel(model, 16, PROJECTIONS, masked=masked).row(512, checkpointing=False)
                        for masked in (False, True))  # fmt: skip
    repeated = 512 * model.layers * 2 * (model.query - model.key_value) * 2
    assert with_it - without == model.layers * 512 * 512 * 2 + repeated


def test_layers_without_lora_keep_less() -> None:
    model = known("Qwen/Qwen3-8B")
    every, attention = (ActivationModel(model, 16, names).row(1024, checkpointing=False)
                        for names in (PROJECTIONS, PROJECTIONS[:4]))  # fmt: skip
    # The input of gate and up, that of down, and three A's answers.
    assert every - attention == 1024 * model.layers * 2 * (model.hidden + model.intermediate + 3 * 16)


def test_each_number_of_an_adapter_costs_twenty_bytes_in_bf16() -> None:
    model = known("Qwen/Qwen3-8B")
    training = trainer.TrainerSetup(4096, checkpointing=True, rank=16, names=PROJECTIONS)
    lines = {line.name: line.size for line in trainer.items(model, training)}
    assert sum(lines[name] for name in ("adapter", "gradients", "AdamW")) == 20 * model.adapter_weights(16)
    full = {line.name: line.size for line in trainer.items(model, replace(training, number_bytes=4))}
    assert full["adapter"] == 4 * model.adapter_weights(16), "fp32 multiplies with the masters themselves"
    assert lines["weights"] == 2 * model.weights


def test_every_line_says_why() -> None:
    found = planned("Qwen/Qwen3-8B")
    assert all(line.why and line.size >= 0 for line in (*found.trainer, *found.engine))


def test_a_layer_with_a_window_caches_no_more_than_that() -> None:
    gemma = known("google/gemma-3-1b-it")
    each = 2 * gemma.key_value * 2
    assert engine.cache_bytes(gemma, 32768, 2) == each * (22 * 512 + 4 * 32768)
    assert engine.cache_bytes(gemma, 100, 2) == each * 26 * 100


def test_experts_that_are_stored_in_four_bits_are_served_so_and_trained_whole() -> None:
    found = planned("openai/gpt-oss-20b", FOUR)
    serve, train = (
        {line.name: line.size for line in part}["weights"] for part in (found.engine, found.trainer)
    )
    assert serve < 15e9 < 40e9 < train


# ------------------------------------------------------------------ choices


def test_7b_on_one_h100_is_planned_so_that_it_fits() -> None:
    found = planned("Qwen/Qwen2.5-7B-Instruct")
    assert found.fits and found.shared and found.activation_checkpointing
    assert total(found.trainer) + total(found.engine) <= usable(found.listed_bytes)
    assert found.memory_fraction is not None and 0.4 < found.memory_fraction < 0.7
    assert found.cache_tokens >= found.max_model_len
    unplanned = planned("Qwen/Qwen2.5-7B-Instruct", memory_fraction=0.9)
    assert not unplanned.fits, "what vLLM takes where nobody says otherwise"


def test_an_engine_that_shares_its_gpu_is_told_its_cache() -> None:
    """What it would measure there is the trainer's as well, which loads beside it."""
    found = planned("Qwen/Qwen2.5-7B-Instruct")
    (cache,) = [line for line in found.engine if line.name == "cache"]
    assert found.kv_cache_gib is not None and cache.size == round(found.kv_cache_gib * 2**30)
    assert planned("Qwen/Qwen2.5-7B-Instruct", FOUR).kv_cache_gib is None
    assert planned("Qwen/Qwen2.5-7B-Instruct", kv_cache_gib=4.0).cache_tokens == 4 * 2**30 // (
        28 * 2 * 512 * 2
    )
    assert not planned("Qwen/Qwen2.5-7B-Instruct", kv_cache_gib=60.0).fits


def test_32b_on_one_h100_is_refused_with_what_would_do() -> None:
    found = suggestions.plan_with_suggestions(known("Qwen/Qwen3-32B"), ONE, Overrides())
    assert found is not None and not found.fits
    assert found.short is not None and "on one GPU training takes" in found.short
    assert found.instead[0] == "H100:2" and not found.in_the_way
    for other in found.instead:
        gpu, _, count = other.partition(":")
        assert planned("Qwen/Qwen3-32B", MachineGpus(gpu, int(count), 1, max(1, int(count) - 1))).fits


@pytest.mark.parametrize(
    ("model", "machine", "wishes"),
    [
        ("Qwen/Qwen3-32B", ONE, {}),
        ("Qwen/Qwen3-8B", ONE, {"memory_fraction": 0.9}),
        ("Qwen/Qwen3-8B", ONE, {"kv_cache_gib": 60.0}),
        ("Qwen/Qwen3-8B", FOUR, {"memory_fraction": 0.1}),
        ("Qwen/Qwen3-32B", MachineGpus("A100", 4, 1, 3), {}),
    ],
)
def test_what_does_not_fit_is_refused_by_the_sums_of_its_table(
    model: str, machine: MachineGpus, wishes: dict[str, float]
) -> None:
    found = planned(model, machine, **wishes)
    assert found.short is not None
    sums = [planning.format_gib(total(part)) for part in (found.trainer, found.engine)]
    of_which = [part for part, size in zip(("training", "serving"), sums, strict=True) if size in found.short]
    assert of_which == (["training", "serving"] if machine.shared else [of_which[0]])


def test_whatever_an_engine_can_sample_can_be_trained() -> None:
    found = planned("Qwen/Qwen3-8B", FOUR)
    assert found.max_model_len == 32768 and found.activation_checkpointing
    short = planned("Qwen/Qwen3-8B", FOUR, max_model_len=2048)
    assert not short.activation_checkpointing, "short samples leave room to compute nothing twice"
    assert (short.max_model_len, short.pack_tokens) == (2048, 4096)


def test_a_sample_longer_than_a_pack_is_one_of_few_rows_no_more_than_a_quarter_longer() -> None:
    """As trainer/packing.py lays them out: what is planned is the row, not the sample."""
    uneven = planned("Qwen/Qwen3-8B", FOUR, max_model_len=9000, pack_tokens=4096, checkpointing=True)
    row = planned("Qwen/Qwen3-8B", FOUR, max_model_len=10240, pack_tokens=4096, checkpointing=True)
    assert uneven.trainer == row.trainer


def test_a_context_a_little_longer_takes_a_little_more() -> None:
    """Qwen3-8B's own 40,960 on one H100, where 32,768 is the default."""
    whole = planned("Qwen/Qwen3-8B", max_model_len=40960)
    assert whole.fits and total(whole.trainer) < 1.2 * total(planned("Qwen/Qwen3-8B").trainer)
    (kept,) = [line.why for line in whole.trainer if line.name == "kept"]
    assert kept.endswith("for a row of 40,960")


def test_more_gpus_that_train_share_a_steps_rows() -> None:
    packs = [
        planned("Qwen/Qwen3-0.6B", MachineGpus("H100", 8, train, 8 - train)).pack_tokens
        for train in (1, 2, 4)
    ]
    assert packs == [16384, 8192, 4096]


def test_what_somebody_set_is_kept() -> None:
    found = planned(
        "Qwen/Qwen3-4B", FOUR, checkpointing=True, pack_tokens=5000, max_model_len=3000, max_num_seqs=32,
        memory_fraction=0.8,
    )  # fmt: skip
    assert (found.activation_checkpointing, found.pack_tokens, found.max_model_len) == (True, 5000, 3000)
    assert (found.engine_places, found.memory_fraction) == (32, 0.8)


def test_a_wish_that_is_in_the_way_is_named() -> None:
    wishes = Overrides(checkpointing=False, max_model_len=32768)
    found = suggestions.plan_with_suggestions(known("Qwen/Qwen3-8B"), FOUR, wishes)
    assert found is not None and not found.fits
    assert found.in_the_way == ("train.activation_checkpointing",) and not found.instead


@pytest.mark.process
def test_a_model_too_large_for_any_gpu_has_no_other_gpus() -> None:
    giant = replace(known("Qwen/Qwen3-32B"), layers=800, windows=(None,) * 800)
    found = suggestions.plan_with_suggestions(giant, ONE, Overrides())
    assert found is not None and not found.fits and not found.instead


def test_engines_have_vllms_own_places_where_there_is_room_for_them() -> None:
    assert planned("Qwen/Qwen3-8B", FOUR).engine_places is None
    assert engine.defaults("H100", 81559 * 2**20) == (1024, 8192)
    assert engine.defaults("A100-80GB", 81920 * 2**20) == engine.defaults("L4", 23034 * 2**20) == (256, 2048)
    assert engine.defaults("B200", 183359 * 2**20) == (1024, 16384)


def test_an_unknown_gpu_has_no_plan() -> None:
    assert plan(known("Qwen/Qwen3-8B"), MachineGpus("NPU9000", 1, 1, 1), Overrides()) is None


@pytest.mark.parametrize(
    ("name", "mib"),
    [("H100", 81559), ("H100-SXM", 81559), ("h100", 81559), ("H100-MEGA-80GB", 81559), ("A100", 40960),
     ("A100-80GB", 81920), ("A100-80GB-SXM", 81920), ("H200-SXM", 143771)],
)  # fmt: skip
def test_a_gpu_is_known_by_the_names_it_is_rented_under(name: str, mib: int) -> None:
    assert gpu_memory.memory_bytes(name) == mib * 2**20


def test_a_gpu_that_is_not_in_the_table_may_say_its_memory_itself() -> None:
    assert gpu_memory.memory_bytes("V100-32GB") == 32 * 10**9
    assert gpu_memory.memory_bytes("GH200-480GB") is None, "that is the computer's"


def test_what_is_assumed_of_our_own_code_is_what_it_says() -> None:
    here = Path(__file__).resolve().parents[2] / "runtime"
    assert f"chunk: int = {assumptions.LOGITS_CHUNK}," in (here / "trainer" / "losses.py").read_text()
    assert command._MAX_CONTEXT["cuda"] == planning.CONTEXT_LENGTHS[0]
    assert (
        f"memory_fraction or {assumptions.ENGINE_FRACTION})" in (here / "engine" / "command.py").read_text()
    )


@pytest.mark.process
def test_the_tables_that_are_written_down_are_those_of_the_arithmetic() -> None:
    assert memory.FILE.read_text() == memory.tables(), "python -m tests.bench.memory --write"
