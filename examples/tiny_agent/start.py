"""The weights that the embedded agent model's training begins with: it copies what followed a word before.

The first layer's first head looks at the word before, by its biases and rotary positions alone; two heads of
the second layer look for a place that came after the present word, and pass on the word that is there: an
induction head (arXiv 2209.11895). Words of a kind begin alike. What it gains is in tests/bench/RESULTS.md.
Neighbours: `make.py` trains from here.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from examples.tiny_agent import tasks, words
from examples.tiny_model.make import settings_of

MAX_POSITIONS = 8192
WIDTH, HEADS, HEAD = 256, 4, 64
# Of the width, what embeddings fill at first; the rest holds the word before.
EMBEDDED = 192
# Dimensions by which a word is found again: those that rotary positions turn least.
FOUND = 40
ROPE_THETA = 1e6
DEVIATION = 0.06
# The bias that makes a head look at the word before, the length of what is compared and of what is passed on.
LOOK_BACK, SHARPNESS, PASSED_ON = 7.0, 2.0, 0.45
# What heads without a task pass on at first, and the word before in units of an embedding.
OTHERS, BEFORE = 0.01, 1 / 16


def make_model(tokenizer: Qwen2Tokenizer, seed: int) -> PreTrainedModel:
    """Six layers of width 256, four heads of 64."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        **settings_of(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=640,
        num_hidden_layers=6,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=DEVIATION,
        rope_parameters={"rope_theta": ROPE_THETA, "rope_type": "default"},
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        _bring_together(model, tokenizer)
        model.get_input_embeddings().weight[:, EMBEDDED:] = 0
        for layer in model.model.layers:
            torch.nn.init.zeros_(layer.mlp.down_proj.weight)
            _pass_on(layer.self_attn)
        compared_FD = _basis(FOUND)
        _look_at_the_word_before(model.model.layers[0].self_attn, compared_FD)
        _look_for_the_same_word(model.model.layers[1].self_attn, compared_FD)
    return model


def _basis(count: int) -> torch.Tensor:
    """So many orthonormal directions of the embeddings, [count, WIDTH]."""
    basis = torch.zeros(count, WIDTH)
    basis[:, :EMBEDDED] = torch.linalg.qr(torch.randn(EMBEDDED, count))[0].T
    return basis


def _pass_on(attention: torch.nn.Module) -> None:
    """Each head passes on a part of what it looks at, a little of it (arXiv 2305.09828)."""
    bases = [torch.linalg.qr(torch.randn(WIDTH, HEAD))[0].T for _ in range(HEADS)]
    attention.v_proj.weight.copy_(torch.cat(bases))
    attention.o_proj.weight.copy_(torch.cat(bases).T * OTHERS)


def _look_at_the_word_before(attention: torch.nn.Module, compared_FD: torch.Tensor) -> None:
    """Head 0: queries and keys are biases, turned by one position against each other."""
    turns = ROPE_THETA ** (-torch.arange(HEAD // 2) / (HEAD // 2))
    attention.q_proj.weight[:HEAD] = 0
    attention.k_proj.weight[:HEAD] = 0
    attention.k_proj.bias[:HEAD] = LOOK_BACK * torch.cat([torch.ones(HEAD // 2), torch.zeros(HEAD // 2)])
    attention.q_proj.bias[:HEAD] = LOOK_BACK * torch.cat([turns.cos(), -turns.sin()])
    attention.v_proj.weight[:HEAD] = 0
    attention.v_proj.weight[:FOUND] = compared_FD
    attention.o_proj.weight[EMBEDDED:] = 0
    attention.o_proj.weight[:, :HEAD] = 0
    attention.o_proj.weight[EMBEDDED : EMBEDDED + FOUND, :FOUND] = torch.eye(FOUND) * BEFORE


def _look_for_the_same_word(attention: torch.nn.Module, compared_FD: torch.Tensor) -> None:
    """Heads 0 and 1: the present word is compared with the word before each place."""
    slow = range(HEAD // 2 - FOUND // 2, HEAD // 2)
    places = [*slow, *(it + HEAD // 2 for it in slow)]
    before_FD = torch.zeros(FOUND, WIDTH)
    before_FD[:, EMBEDDED : EMBEDDED + FOUND] = torch.eye(FOUND)
    for head in range(2):
        rows = [head * HEAD + it for it in places]
        for projection, weights_FD in ((attention.q_proj, compared_FD), (attention.k_proj, before_FD)):
            projection.weight[head * HEAD : (head + 1) * HEAD] = 0
            projection.weight[rows] = weights_FD * SHARPNESS
        passed_HD = _basis(HEAD)
        attention.v_proj.weight[head * HEAD : (head + 1) * HEAD] = passed_HD
        attention.o_proj.weight[:, head * HEAD : (head + 1) * HEAD] = passed_HD.T * PASSED_ON


def _kinds() -> Iterator[tuple[str, ...]]:
    """Words that begin alike: those of a kind, a number and its digit, a field's names and its values."""
    yield from words.kinds()
    for digit in range(10):
        yield (str(digit), words.NUMBER_WORDS[digit], *words.TENS[max(0, digit - 2) : max(0, digit - 1)])
    for wanted, names in tasks.WANTED.items():
        yield (*names, *tasks.LISTS.get(wanted, ()))


def _bring_together(model: PreTrainedModel, tokenizer: Qwen2Tokenizer) -> None:
    """Begin with embeddings that are alike for words of a kind, and for a word after a blank or in capitals.

    A copied word is often another token: "the lamp" in a question is `{"item": "lamp"}` in a call.
    """
    numbers = {text: number for text, number in tokenizer.get_vocab().items() if text.strip("Ġ").isalnum()}
    weights_VD = model.get_input_embeddings().weight
    for kind in _kinds():
        shared_D = torch.randn(weights_VD.shape[1]) * DEVIATION
        found = {numbers.get(word, numbers.get(f"Ġ{word}")) for word in kind}
        weights_VD[sorted(found - {None})] += shared_D
    after_blank_D, capital_D = torch.randn(2, weights_VD.shape[1]) * DEVIATION
    for text, number in numbers.items():
        plain = text.removeprefix("Ġ")
        small = plain[:1].lower() + plain[1:]
        origin = numbers.get(small, numbers.get(plain, number))
        if origin != number:
            weights_VD[number] = weights_VD[origin]
            weights_VD[number] += after_blank_D if plain != text else 0
            weights_VD[number] += capital_D if plain != small and origin == numbers.get(small) else 0
