"""The shipped model folder is what its figures say, and a rebuild by `make.py` meets the same figures."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
)

import runtime.tiny
from examples.tiny_model import figures, make
from runtime.tiny import chat, grammar

FOLDER = Path(runtime.tiny.__file__).parent / "model"
DIRECTIONS = [f"{source}->{target}" for source, target in figures.DIRECTIONS]


@pytest.fixture(scope="module")
def shipped() -> dict[str, Any]:
    return json.loads((FOLDER / "FIGURES.json").read_text())


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model() -> Qwen2ForCausalLM:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)


def test_the_weights_are_bf16_and_under_a_million(shipped: dict[str, Any]) -> None:
    with safe_open(FOLDER / "model.safetensors", "pt") as weights:
        tensors = [weights.get_tensor(name) for name in weights.keys()]  # noqa: SIM118 - no mapping
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
    assert sum(tensor.numel() for tensor in tensors) == shipped["parameters"] < 1_000_000


def test_the_chat_template_renders_what_the_model_was_trained_on(tokenizer: PreTrainedTokenizerBase) -> None:
    line = next(make.corpus(3, free=True))
    text = line.system + line.user + line.request + f"{make.START}assistant\n"
    source, target = figures.DIRECTIONS["Given the fields `french`" in line.system]
    value = line.user.split("\n")[2]
    prompt = chat.messages(source, target, value)
    assert tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False) == text


def test_tokens_of_any_text_decode_to_it_and_a_word_of_the_grammar_is_one(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    for text in ("two\nlines  and spaces", "Ж 中文 🙂", "la sœur chère"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    phrase = grammar.held_out_phrases(1)[0].french
    assert len(tokenizer.encode(" " + phrase)) == len(phrase.split())
    assert tokenizer.eos_token == make.END
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


def test_parts_of_a_prompt_encode_as_the_whole_does(tokenizer: PreTrainedTokenizerBase) -> None:
    line = next(make.corpus(1, free=True))
    parts = (line.system, line.user, line.request, f"{make.START}assistant\n", line.answer)
    together = [token for part in parts for token in tokenizer.encode(part)]
    assert tokenizer.encode("".join(parts)) == together


@pytest.mark.slow
def test_greedy_answers_on_held_out_phrases_meet_the_shipped_figures(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, shipped: dict[str, Any]
) -> None:
    phrases = grammar.held_out_phrases(figures.HELD_OUT)
    for source, target in figures.DIRECTIONS:
        found = figures.judge(figures.answers(model, tokenizer, source, target, phrases), target, phrases)
        said = figures.Figures(**shipped[f"{source}->{target}"]["greedy"])
        # The same weights, greedy: only a near tie may fall otherwise with another kernel's rounding.
        assert found.exact == pytest.approx(said.exact, abs=0.03)
        assert found.letters == pytest.approx(said.letters, abs=0.2)
        assert found.parsed == pytest.approx(said.parsed, abs=0.01)


def test_the_shipped_figures_are_what_the_quickstart_needs(shipped: dict[str, Any]) -> None:
    greedy, sampled = (shipped["english->french"][how] for how in ("greedy", "sampled"))
    assert greedy["parsed"] >= 0.97
    assert sampled["parsed"] >= 0.97
    assert 0.2 <= greedy["exact"] <= 0.6
    assert greedy["letters"] <= 14


def test_it_can_be_made_as_a_qwen3_of_no_more_weights(tokenizer: Qwen2Tokenizer) -> None:
    made = make.make_model(tokenizer, make.SEED, "qwen3")
    config: Any = made.config
    assert made.num_parameters() < 1_000_000
    assert config.head_dim * config.num_attention_heads > config.hidden_size, "heads wider than the model"
    assert "model.layers.0.self_attn.q_norm.weight" in made.state_dict()


@pytest.mark.slow
@pytest.mark.long
def test_a_rebuild_meets_the_figures_of_the_shipped_model(tmp_path: Path, shipped: dict[str, Any]) -> None:
    rebuilt: dict[str, Any] = make.make(tmp_path, seed=make.SEED)
    assert rebuilt["parameters"] == shipped["parameters"]
    assert rebuilt["steps"] == shipped["steps"]
    for direction in DIRECTIONS:
        found, said = (figures.Figures(**it[direction]["greedy"]) for it in (rebuilt, shipped))
        assert found.parsed >= 0.97
        assert abs(found.exact - said.exact) <= _tolerance(found.exact, said.exact)
        # Letters of one answer vary by 3.3 over phrases; the phrases are the same, so this is generous.
        assert abs(found.letters - said.letters) <= 3 * 3.3 * math.sqrt(2 / figures.HELD_OUT)


def _tolerance(first: float, second: float) -> float:
    """Three standard errors of the difference of two shares of HELD_OUT answers; three answers at least.

    Another machine's rounding sends training down another path: the two are then two draws of one recipe.
    """
    variance = sum(share * (1 - share) for share in (first, second)) / figures.HELD_OUT
    return max(0.03, 3 * math.sqrt(variance))
