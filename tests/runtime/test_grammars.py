"""Answers held to a grammar: trained with the mask that the engine sampled with, or not at all (C9, R7)."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from runtime.gateway.engines.engine_client import EngineClient
from runtime.gateway.requests import distribution
from runtime.gateway.requests.request_fields import Kind
from runtime.gateway.samples.samples import SampleStore
from runtime.shared.batch import Batch, BatchError, empty_batch
from runtime.shared.grammar import Grammar, repeatable
from runtime.shared.headers import REFUSE, UNTRAINABLE_HEADER
from runtime.shared.learnable import learnable
from runtime.trainer import losses
from runtime.trainer import policy as policies
from runtime.trainer.forward import pack_logprobs, sequences
from runtime.trainer.grammar_masks import GrammarMasks
from runtime.trainer.packing import Pack, pack
from runtime.trainer.policy import Lora, Policy
from tests.runtime.conftest import TINY_MODEL, RunningEngine, start_engine
from tests.runtime.gateway_here import ask, gateway_here
from tests.runtime.recorded import record_choices
from tests.runtime.test_recorded_answers import EOS, admitted, answered, with_engine
from tests.runtime.test_samples import batch_of
from tests.runtime.trainer_fixtures import SETTINGS

SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "blue", 'a "quoted" one']},
        "count": {"type": "integer", "minimum": 0, "maximum": 12},
        "words": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 3},
    },
    "required": ["colour", "count"],
}
FORM = {"type": "json_schema", "json_schema": {"name": "painting", "schema": SCHEMA, "strict": True}}
CHOICES = ["oui", "non", 'said "no"\n', "back\\slash\t\x01", "été"]
HELD: list[dict[str, Any]] = [
    {"response_format": FORM},
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"json": json.dumps(SCHEMA)}},
    {"structured_outputs": {"json_object": True}},
    {"structured_outputs": {"regex": r"(the|a) [a-z]{3,8}( and [0-9]+)?\."}},
    {"structured_outputs": {"choice": CHOICES}},
    {"structured_outputs": {"choice": CHOICES}, "stop_token_ids": [300, 5]},
    {"structured_outputs": {"regex": "[a-z ]*"}, "stop": ["e"]},
]


def only_pack(batch: Batch) -> Pack:
    (one,) = pack(sequences(batch), range(batch.sequences), 1 << 20)
    return one


def computed(policy: Policy, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each sampled token the logprob by trainer and by engine."""
    one = only_pack(batch)
    with torch.no_grad():
        found = pack_logprobs(policy, one, batch)
    return found.logprob_T, torch.from_numpy(batch.logprobs)[one.source_T]


async def sampled_by_grammars(client: EngineClient, store: SampleStore, kind: Kind) -> list[str]:
    """An answer of each form at each of two temperatures; the rollouts' names."""
    names = []
    for temperature in (1.0, 0.6):
        for number, held in enumerate(HELD):
            body = held | {"temperature": temperature, "n": 3, "max_tokens": 60}
            asked = replace(admitted(kind, body), id=f"{kind}-{temperature}-{number}")
            asked = replace(asked, tags=replace(asked.tags, rollout=asked.id))
            _, _, _, choices = await answered(client, asked)
            record_choices(store, asked, choices, msgspec.Raw(b"{}"), 0, True)
            names.append(asked.id)
    return names


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as instruct models are published: with more ends than the tokenizer's own."""
    folder = tmp_path_factory.mktemp("model") / "model"
    shutil.copytree(TINY_MODEL, folder)
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, vocabulary["Ċ"]]}))
    return folder


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    own = start_engine(tmp_path_factory.mktemp("engine"), model_path=str(model))
    try:
        own.wait_until_ready()
        yield RunningEngine(own.socket, model)
    finally:
        own.end()


@pytest.fixture(scope="module")
def policy(model: Path) -> Policy:
    return policies.build(model, Lora(rank=4, alpha=4.0), dtype="float32", device="cpu", seed=0)


@pytest.fixture(scope="module")
def step(engine: RunningEngine, tmp_path_factory: pytest.TempPathFactory) -> Batch:
    """What a real engine sampled under every grammar, by chat and by completions."""
    store = SampleStore(tmp_path_factory.mktemp("grammars"))
    names: list[str] = []

    async def scenario(client: EngineClient) -> None:
        for kind in ("chat", "completion"):
            names.extend(await sampled_by_grammars(client, store, kind))

    with_engine(engine, scenario)
    return batch_of(store, *names)


@pytest.mark.slow
def test_c09_r07_the_trainer_has_the_engines_logprobs_of_what_a_grammar_held(
    step: Batch, policy: Policy
) -> None:
    assert step.sequences == 2 * 2 * 3 * len(HELD)
    assert len(step.meta["grammars"]) == len({repeatable(held) for held in HELD})
    own, engines = computed(policy, step)
    assert float((own - engines).abs().max()) < 1e-3
    unheld, _ = computed(policy, replace(step, meta=step.meta | {"grammars": []} | {"samples": _bare(step)}))
    assert float((unheld - engines).abs().max()) > 1, "these grammars forbid nothing, and prove nothing"


@pytest.mark.slow
def test_c09_an_answer_that_its_grammar_does_not_allow_is_not_trained_and_counted(
    step: Batch, policy: Policy
) -> None:
    assert policy.grammar_masks.checked(step) is step
    before = learnable(step, SETTINGS)
    (row, *others), tokens = before.sequences, step.tokens.copy()
    first = int(step.offsets[row] + np.flatnonzero(step.sampled[step.span(row)])[0])
    tokens[first] = (tokens[first] + 1) % 3  # a special token, which no grammar here begins with
    checked = policy.grammar_masks.checked(replace(step, tokens=tokens))
    assert checked.of_other_grammars == [row]
    found = learnable(checked, SETTINGS)
    assert found.dropped - before.dropped == {"held to another grammar": 1}
    assert found.sequences == others


def test_a_grammar_that_cannot_be_compiled_refuses_its_step_by_name(tmp_path: Path) -> None:
    meta = {"schema": 2, "grammars": [{"kind": "json", "text": "{}", "stop_token_ids": []}]}
    meta |= {"samples": [{"turns": [{"start": 1, "end": 2, "grammar": 0}]}]}
    batch = replace(empty_batch(meta), offsets=np.array([0, 2]), tokens=np.array([1, 2], np.int32))
    with pytest.raises(BatchError, match="cannot be repeated"):
        GrammarMasks(tmp_path, 10).checked(batch)


@pytest.mark.slow
def test_what_a_grammar_held_is_computed_alike_in_many_packs(step: Batch, policy: Policy) -> None:
    whole, one = computed(policy, step)[0], only_pack(step)
    by_source = dict(zip(one.source_T.tolist(), whole.tolist(), strict=True))
    for part in pack(sequences(step), range(step.sequences), 512):
        with torch.no_grad():
            found = pack_logprobs(policy, part, step).logprob_T
        again = torch.tensor([by_source[source] for source in part.source_T.tolist()])
        assert torch.allclose(found, again, atol=1e-4)


def _bare(step: Batch) -> list[dict[str, Any]]:
    """The description of the samples as if nothing had held them."""
    return [
        one | {"turns": [{k: v for k, v in turn.items() if k != "grammar"} for turn in one["turns"]]}
        for one in step.meta["samples"]
    ]


# ------------------------------------------------------------------ the mask itself


@pytest.mark.parametrize("chunk", [4, 100])
def test_c09_logprobs_and_gradients_under_a_mask_are_those_of_the_allowed_tokens_alone(chunk: int) -> None:
    generator = torch.Generator().manual_seed(3)
    size, tokens = 70, 10
    table_TV = torch.randn(tokens, size, generator=generator, dtype=torch.float64).float().requires_grad_()
    allowed_TV = torch.rand(tokens, size, generator=generator) < 0.3
    target_T = torch.randint(size, (tokens,), generator=generator)
    allowed_TV[torch.arange(tokens), target_T] = True
    temperature_T = torch.linspace(0.3, 2, tokens)
    found = losses.token_logprobs(
        table_TV, lambda hidden: hidden, target_T, temperature_T, _packed(allowed_TV), chunk=chunk
    )
    found.logprob_T.sum().backward()
    for row in range(tokens):
        few = table_TV.detach()[row, allowed_TV[row]].double().requires_grad_()
        logprobs = (few / temperature_T[row].double()).log_softmax(-1)
        place = int(allowed_TV[row, : target_T[row]].sum())
        logprobs[place].backward()
        assert float(found.logprob_T[row]) == pytest.approx(float(logprobs[place]), abs=1e-4)
        entropy = -(logprobs.exp() * logprobs).nan_to_num().sum()
        assert float(found.entropy_T[row]) == pytest.approx(float(entropy), abs=1e-4)
        assert table_TV.grad is not None and few.grad is not None
        assert torch.allclose(table_TV.grad[row, allowed_TV[row]].double(), few.grad, atol=1e-4)
        assert not table_TV.grad[row, ~allowed_TV[row]].any()


def _packed(allowed_TV: torch.Tensor) -> torch.Tensor:
    """As xgrammar has it: words of 32 bits, the first token's lowest."""
    bits = np.packbits(allowed_TV.numpy(), axis=1, bitorder="little")
    padded = np.pad(bits, ((0, 0), (0, -bits.shape[1] % 4)))
    return torch.from_numpy(padded.view(np.int32).copy())


# ------------------------------------------------------------------ which can be repeated


def test_c09_a_model_that_thinks_has_no_sample_of_a_grammar(tmp_path: Path) -> None:
    """Its grammar begins where the engine's parser sees the end of a thought."""
    folder = tmp_path / "thinks"
    folder.mkdir()
    (folder / "chat_template.jinja").write_text("{{ messages }}<think></think>")
    (folder / "tokenizer.json").write_text(json.dumps({"added": ["<think>", "</think>"]}))

    async def scenario() -> tuple[int, Any]:
        async with gateway_here(tmp_path, tmp_path, engines=1, model=str(folder)) as parts:
            refuse = {UNTRAINABLE_HEADER: REFUSE}
            return await ask(parts, "r", [{"role": "user", "content": "a"}], refuse, response_format=FORM)

    status, answer = asyncio.run(scenario())
    assert status == 422 and "of a model that thinks" in answer["error"]["message"], answer


@pytest.mark.parametrize("held", HELD, ids=str)
def test_c09_r07_a_grammar_that_can_be_repeated_costs_no_sample(held: dict[str, Any]) -> None:
    assert repeatable(held) is not None
    assert distribution.distorted_by(held, repeats_grammars=lambda: True) is None
    assert distribution.distorted_by(held | {"top_p": 0.5}, repeats_grammars=lambda: True) == "top_p"
    assert distribution.distorted_by(held) in held
    grammar = repeatable(held)
    assert grammar == Grammar.from_json(json.loads(json.dumps(grammar.as_json())))


@pytest.mark.parametrize(
    "odd",
    [
        {},
        {"response_format": {"type": "text"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "none"}}},
        {"response_format": {"type": "structural_tag", "format": {}}},
        {"response_format": FORM, "structured_outputs": {"regex": "a"}},
        {"response_format": FORM, "tools": [{"type": "function", "function": {"name": "f"}}]},
        {"response_format": FORM, "ignore_eos": True},
        {"structured_outputs": {"grammar": 'root ::= "a"'}},
        {"structured_outputs": {"structural_tag": "{}"}},
        {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
        {"structured_outputs": {"choice": "abc"}},
        {"structured_outputs": {"regex": "a"}, "stop_token_ids": [3.0]},
        {"structured_outputs": {}},
    ],
    ids=str,
)  # fmt: skip
def test_c09_what_vllm_makes_otherwise_is_not_repeated(odd: dict[str, Any]) -> None:
    assert repeatable(odd) is None
