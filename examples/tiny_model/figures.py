"""The tiny model's figures: parse rate, exact share and letters on held-out phrases.

Neighbours: `make.py` ships these as FIGURES.json and the tests hold the shipped folder and a rebuild to them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from transformers import PreTrainedModel, Qwen2Tokenizer

from runtime.tiny import chat, grammar

DIRECTIONS = (("english", "french"), ("french", "english"))
HELD_OUT = 100
MAX_TOKENS = 64


@dataclass(frozen=True)
class Figures:
    """Shares of the answers (0 to 1), and means over them."""

    parsed: float
    """DSPy's ChatAdapter finds the field."""
    finished: float
    """The answer ends by itself within MAX_TOKENS."""
    exact: float
    """The answer is the reference translation."""
    letters: float
    """Mean number of different letters in the field (an answer that does not parse has none)."""
    tokens: float
    """Mean length of the answers."""


def measure(model: PreTrainedModel, tokenizer: Qwen2Tokenizer) -> dict[str, object]:
    """Figures of both directions on the first HELD_OUT held-out phrases, greedy and sampled at 1.0."""
    held_out = grammar.held_out_phrases(HELD_OUT)
    result: dict[str, object] = {"held_out": HELD_OUT}
    for source, target in DIRECTIONS:
        result[f"{source}->{target}"] = {
            name: asdict(judge(answers(model, tokenizer, source, target, held_out, sample), target, held_out))
            for name, sample in (("greedy", False), ("sampled", True))
        }
    return result


def answers(
    model: PreTrainedModel,
    tokenizer: Qwen2Tokenizer,
    source: str,
    target: str,
    phrases: list[grammar.Phrase],
    sample: bool = False,
) -> list[tuple[str, int, bool]]:
    """One answer per phrase: its text, its length in tokens, and whether it ended by itself."""
    prompts = [
        tokenizer.apply_chat_template(
            chat.messages(source, target, getattr(phrase, source)), add_generation_prompt=True, tokenize=False
        )
        for phrase in phrases
    ]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    torch.manual_seed(0)
    with torch.inference_mode():
        output = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=MAX_TOKENS,
            do_sample=sample,
            temperature=1.0 if sample else None,
            top_k=0 if sample else None,
        )
    found = []
    for row in output[:, inputs["input_ids"].shape[1] :].tolist():
        finished = tokenizer.eos_token_id in row
        ids = row[: row.index(tokenizer.eos_token_id)] if finished else row
        found.append((tokenizer.decode(ids), len(ids) + finished, finished))
    return found


def judge(replies: list[tuple[str, int, bool]], target: str, phrases: list[grammar.Phrase]) -> Figures:
    """The figures of one reply (text, tokens, finished) per phrase."""
    fields = [chat.parse(target, text) for text, _, _ in replies]
    count = len(fields)
    references = [getattr(phrase, target) for phrase in phrases]
    return Figures(
        parsed=sum(field is not None for field in fields) / count,
        finished=sum(finished for _, _, finished in replies) / count,
        exact=sum(map(grammar.exact, (field or "" for field in fields), references)) / count,
        letters=sum(grammar.distinct_letters(field or "") for field in fields) / count,
        tokens=sum(length for _, length, _ in replies) / count,
    )
