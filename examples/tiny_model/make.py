"""Make the embedded model: `python -m examples.tiny_model.make --out DIR [--architecture qwen3]`.

Two minutes. Trains a byte-level BPE and a model of under a million parameters on the noisy phrase book of
`runtime/tiny/grammar.py` in the chat format of `chat.py` beside it, both directions, then writes the Hugging
Face folder that vLLM and transformers load: bf16 weights, tokenizer, chat template and `FIGURES.json`
(`figures.py`). The default, a Qwen2, is the one that ships.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import (
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from examples.tiny_model.figures import DIRECTIONS, measure
from runtime.tiny import chat, grammar


@dataclass(frozen=True)
class Phase:
    """A stretch of supervised training."""

    name: str
    steps: int
    batch: int
    learning_rate: float
    whole: bool
    """On whole prompts, else on rows without the boilerplate."""
    free: bool
    """With the author's embroidery, which hides what follows from what: the words come first without."""


SEED = 0
PHASES = (
    Phase("words", steps=340, batch=64, learning_rate=3e-3, whole=False, free=False),
    Phase("embroidery", steps=60, batch=64, learning_rate=1e-3, whole=False, free=True),
    Phase("prompts", steps=60, batch=32, learning_rate=1e-3, whole=True, free=True),
)
WARMUP_STEPS = 20
VOCABULARY = 1024
REVERSE_SHARE = 0.33
MAX_POSITIONS = 1024

ARCHITECTURES = ("qwen2", "qwen3")

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Line:
    """One line of the corpus: a prompt in two parts and the assistant's text up to and with `<|im_end|>`."""

    system: str
    user: str
    """The user's field and its header, to the end of the value."""
    request: str
    """The rest of the user's turn, which is the same for every line of a direction."""
    answer: str


def corpus(seed: int, free: bool) -> Iterator[Line]:
    """Endless lines of the phrase book in DSPy's chat format, a third of them French to English."""
    rng = random.Random(seed)
    while True:
        reverse = rng.random() < REVERSE_SHARE
        source, target = DIRECTIONS[reverse]
        phrase = grammar.noisy(rng, free=free and not reverse)
        system, user = (turn["content"] for turn in chat.messages(source, target, getattr(phrase, source)))
        field, blank, request = user.partition("\n\n")
        yield Line(
            f"{START}system\n{system}{END}\n",
            f"{START}user\n{field}",
            f"{blank}{request}{END}\n",
            chat.completion(target, getattr(phrase, target)) + END,
        )


def make_tokenizer(seed: int) -> Qwen2Tokenizer:
    """Trained on the corpus: a word of the grammar is one token."""
    lines = islice(corpus(seed, free=False), 4000)
    return tokenizer_of((text for line in lines for text in astuple(line)), VOCABULARY)


def tokenizer_of(texts: Iterable[str], vocabulary: int) -> Qwen2Tokenizer:
    """Qwen2's byte-level BPE, trained on these texts; any other encodes too."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    learnt = json.loads(tokenizer.to_str())["model"]
    made = Qwen2Tokenizer(
        vocab=learnt["vocab"],
        merges=[tuple(merge) for merge in learnt["merges"]],
        unk_token=None,
        eos_token=END,
        pad_token=PAD,
        extra_special_tokens=[START],
        model_max_length=MAX_POSITIONS,
    )
    made.chat_template = CHAT_TEMPLATE
    return made


def settings_of(tokenizer: Qwen2Tokenizer) -> dict[str, Any]:
    """The part of a small model's configuration that follows from its tokenizer: its embeddings are tied."""
    return {
        "vocab_size": len(tokenizer),
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def make_model(tokenizer: Qwen2Tokenizer, seed: int, architecture: str = ARCHITECTURES[0]) -> PreTrainedModel:
    """A fresh model: 4 layers of width 128, head size 32 (the least that vLLM's CPU attention takes).

    As a Qwen3 it normalises queries and keys, and its heads together are wider than it is, as in Qwen3-0.6B.
    """
    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        **settings_of(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_POSITIONS,
        # 1/sqrt(128): at the usual 0.02 so small a model learns no alignment in time.
        "initializer_range": 0.09,
    }
    if architecture == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**shape, num_attention_heads=6, head_dim=32))
    return Qwen2ForCausalLM(Qwen2Config(**shape, num_attention_heads=4))


def _row(tokenizer: Qwen2Tokenizer, line: Line, whole: bool) -> tuple[list[int], list[int], int]:
    """Token ids, their positions, and how many of them are the answer's.

    A row that is not whole leaves out the boilerplate (system turn and request) but keeps its positions:
    the translation is learnt at the distances of the real prompt for a quarter of the compute.
    """
    system, user, request, answer = (tokenizer.encode(part) for part in astuple(line))
    turn = tokenizer.encode(f"{START}assistant\n")
    parts = [(system, whole), (user, True), (request, whole), (turn + answer, True)]
    ids: list[int] = []
    positions: list[int] = []
    place = 0
    for part, kept in parts:
        if kept:
            ids += part
            positions += range(place, place + len(part))
        place += len(part)
    return ids, positions, len(answer)


def _loss(
    model: PreTrainedModel, tokenizer: Qwen2Tokenizer, lines: Iterator[Line], count: int, whole: bool
) -> torch.Tensor:
    """Mean cross-entropy of the answers' tokens over `count` lines, right-padded to [B, L]."""
    rows = [_row(tokenizer, line, whole) for line in islice(lines, count)]
    width = max(len(ids) for ids, _, _ in rows)
    ids_BL = torch.zeros(count, width, dtype=torch.long)
    positions_BL, mask_BL = torch.zeros_like(ids_BL), torch.zeros_like(ids_BL)
    answer_BL = torch.zeros(count, width, dtype=torch.bool)
    for row, (ids, positions, answer) in enumerate(rows):
        end = len(ids)
        ids_BL[row, :end] = torch.tensor(ids)
        positions_BL[row, :end] = torch.tensor(positions)
        mask_BL[row, :end] = 1
        answer_BL[row, end - answer : end] = True
    hidden_BLD = model.model(
        input_ids=ids_BL, attention_mask=mask_BL, position_ids=positions_BL
    ).last_hidden_state
    logits_NV = model.lm_head(hidden_BLD[:, :-1][answer_BL[:, 1:]])
    return torch.nn.functional.cross_entropy(logits_NV, ids_BL[:, 1:][answer_BL[:, 1:]])


def train(model: PreTrainedModel, tokenizer: Qwen2Tokenizer, seed: int, phases: tuple[Phase, ...]) -> float:
    """Supervised training in place; returns the mean loss of the last ten steps."""
    losses = []
    model.train()
    for number, phase in enumerate(phases):
        lines = corpus(seed + number, phase.free)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=phase.learning_rate, betas=(0.9, 0.98), weight_decay=0.01
        )
        for step in range(phase.steps):
            for group in optimizer.param_groups:
                group["lr"] = phase.learning_rate * warm_cosine(step, phase.steps)
            loss = _loss(model, tokenizer, lines, phase.batch, phase.whole)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if step % 50 == 0 or step == phase.steps - 1:
                print(f"{phase.name} step {step:4d}  loss {loss.item():.3f}", flush=True)
    model.eval()
    return sum(losses[-10:]) / len(losses[-10:])


def warm_cosine(step: int, steps: int) -> float:
    """Linear warm-up over WARMUP_STEPS, then a cosine to a twentieth."""
    warm = min(1.0, (step + 1) / WARMUP_STEPS)
    return warm * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def make(
    out: Path, seed: int = SEED, phases: tuple[Phase, ...] = PHASES, architecture: str = ARCHITECTURES[0]
) -> dict[str, object]:
    """Make the model, write the folder, return its figures (those of the bf16 weights as shipped)."""
    began = time.monotonic()
    tokenizer = make_tokenizer(seed)
    model = make_model(tokenizer, seed, architecture)
    loss = train(model, tokenizer, seed, phases)
    seconds = time.monotonic() - began
    model.to(torch.bfloat16)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    figures: dict[str, object] = {
        "seed": seed,
        "steps": sum(phase.steps for phase in phases),
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "loss": round(loss, 4),
        "train_seconds": round(seconds, 1),
        **measure(model.float(), tokenizer),
    }
    (out / "FIGURES.json").write_text(json.dumps(figures, indent=2) + "\n")
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the embedded model.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--steps", type=int, default=PHASES[0].steps, help="of the first phase")
    parser.add_argument("--architecture", choices=ARCHITECTURES, default=ARCHITECTURES[0])
    options = parser.parse_args()
    phases = (replace(PHASES[0], steps=options.steps), *PHASES[1:])
    print(json.dumps(make(options.out, options.seed, phases, options.architecture), indent=2))


if __name__ == "__main__":
    main()
