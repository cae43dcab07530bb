"""examples/tiny_agent/make.py: a conversation's tokens are the whole text's; its answers are learned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Tokenizer

from examples.tiny_agent import make

PROMPT = "Respond with one of the teams, and with nothing else at all."
CALL = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": "3 + 4"}}}
CONVERSATIONS: list[dict[str, Any]] = [
    {
        "kind": "label/chat",
        "messages": [
            {"role": "system", "content": f"[[ ## message ## ]]\n\n{PROMPT}"},
            {"role": "user", "content": "My card does not work."},
            {"role": "assistant", "content": "[[ ## team ## ]]\nbilling", "trained": True},
        ],
        "tools": None,
    },
    {
        "kind": "tools/native",
        "messages": [
            {"role": "user", "content": "What is 3 plus 4?"},
            {"role": "assistant", "content": "", "tool_calls": [CALL], "trained": True},
            {"role": "tool", "content": "7"},
            {"role": "assistant", "content": "\n7 é", "trained": True},
            {"role": "user", "content": "Thanks"},
        ],
        "tools": [{"type": "function", "function": {"name": "calculator", "parameters": {}}}],
    },
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Qwen2Tokenizer:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "phrases.json").write_text(json.dumps([PROMPT]))
    lines = [json.dumps(it) + "\n" for it in CONVERSATIONS]
    (folder / "conversations-0.jsonl").write_text("".join(lines))
    return make.make_tokenizer(folder)


def test_the_tokens_in_parts_are_those_of_the_whole_text(tokenizer: Qwen2Tokenizer) -> None:
    rows = [*make.made_rows(tokenizer, CONVERSATIONS)]
    for row, it in zip(rows, CONVERSATIONS, strict=True):
        last = max(number for number, message in enumerate(it["messages"]) if message.get("trained"))
        text = tokenizer.apply_chat_template(it["messages"][: last + 1], tools=it["tools"], tokenize=False)
        assert row.ids == tokenizer.encode(text.removesuffix("\n"))


def test_what_is_learned_is_each_answer_with_its_end(tokenizer: Qwen2Tokenizer) -> None:
    learned = [
        tokenizer.decode([token for token, is_learned in zip(*row, strict=True) if is_learned])
        for row in make.made_rows(tokenizer, CONVERSATIONS)
    ]
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "3 + 4"}}\n</tool_call>'
    assert learned == ["[[ ## team ## ]]\nbilling<|im_end|>", f"{call}<|im_end|>\n7 é<|im_end|>"]


def test_a_sequence_that_comes_again_is_said_again_before_any_training(tokenizer: Qwen2Tokenizer) -> None:
    model = make.make_model(tokenizer, seed=0)
    once = torch.stack([torch.randperm(len(tokenizer))[:100] for _ in range(4)])
    ids = torch.cat([once, once], 1)
    with torch.no_grad():
        logits = model(ids).logits[:, :-1]
    logits.scatter_(2, ids[:, :-1, None], -torch.inf)  # with tied embeddings the word itself comes first
    right = (logits.argmax(-1) == ids[:, 1:])[:, 100:].float().mean()
    assert right > 0.4


def test_each_answer_counts_alike_however_long(tokenizer: Qwen2Tokenizer) -> None:
    (row,) = make.made_rows(tokenizer, CONVERSATIONS[1:])
    model = make.make_model(tokenizer, seed=0)
    answers = list[float]()
    for begin, end in spans(row.learned):
        alone = [begin <= at < end for at in range(len(row.ids))]
        answers.append(make.loss_of(model, hidden_of(model), [row._replace(learned=alone)]).item())
    assert len(answers) == 2
    assert make.loss_of(model, hidden_of(model), [row]).item() == pytest.approx(sum(answers) / 2, rel=0.01)


def hidden_of(model: Any) -> make.Hidden:
    return lambda ids_BL: model.model(input_ids=ids_BL).last_hidden_state


def spans(learned: list[bool]) -> list[tuple[int, int]]:
    edges = [at for at in range(1, len(learned)) if learned[at] != learned[at - 1]]
    edges += [len(learned)] if learned[-1] else []
    return list(zip(edges[::2], edges[1::2], strict=True))


def test_a_line_that_all_prompts_have_is_one_token(tokenizer: Qwen2Tokenizer) -> None:
    assert len(tokenizer.encode(PROMPT)) == 1


def test_a_batch_has_one_width_and_no_more_tokens_than_asked_for() -> None:
    rows = [make.Row([0] * length, [False] * length) for length in range(1, 400)]
    made = make.batches(rows, seed=0, tokens=2048)
    for batch in (next(made) for _ in range(40)):
        (width,) = {next(it for it in make.WIDTHS if it >= len(row.ids)) for row in batch}
        assert len(batch) == 2048 // width


def test_a_training_that_goes_on_from_its_state_comes_to_the_same_weights(
    tokenizer: Qwen2Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make, "KEPT_EVERY", 2)
    monkeypatch.setattr(make, "WIDTHS", (16,))
    monkeypatch.setattr(make, "BATCH_TOKENS", 512)
    monkeypatch.setattr(torch, "compile", lambda it, **_: it)
    rows = [make.Row([(at + it) % 200 for it in range(12)], [True] * 12) for at in range(300)]
    schedule = make.warm_cosine

    def weights(steps: int, state: Path | None, seed: int = 0) -> list[torch.Tensor]:
        model = make.make_model(tokenizer, seed)
        make.train(model, rows, 0, steps, state)
        return [it.detach() for it in model.parameters()]

    whole, state = weights(4, None), tmp_path / "state.safetensors"
    monkeypatch.setattr(make, "warm_cosine", lambda step, _: schedule(step, 4))
    weights(2, state)
    resumed = weights(4, state, seed=1)
    assert all(map(torch.equal, whole, resumed))
