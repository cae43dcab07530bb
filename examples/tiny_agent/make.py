"""Make the embedded agent model: `python -m examples.tiny_agent.make --corpus FOLDER --out DIR`.

Trains a tokenizer and a Qwen2 of some five million parameters on what `corpus.py` wrote, then writes the
Hugging Face folder that vLLM and transformers load.
Neighbours: `examples/tiny_model` makes the smaller one, and lends the tokenizer and the schedule.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import AddedToken
from transformers import PreTrainedModel, Qwen2Tokenizer

from examples.tiny_agent import snapshot, words
from examples.tiny_agent.start import MAX_POSITIONS, make_model
from examples.tiny_agent.template import CHAT_TEMPLATE
from examples.tiny_model.make import tokenizer_of, warm_cosine

SEED = 0
VOCABULARY = 3600
# Rows are padded to one of these; longer ones are left out of training.
WIDTHS = (160, 224, 352, 640, 2304)
# Parts of prompts that are one word each, beside the corpus' fixed lines.
FRAGMENTS = (
    "[[ ## ",
    " ## ]]",
    "[[ ## completed ## ]]",
    "# note: the value you produce must exactly match (no extra characters) one of:",
    "(must be formatted as a valid Python Literal[",
    "Respond with the corresponding output fields, starting with the field `[[ ## ",
    " ## ]]`, and then ending with the marker for `[[ ## completed ## ]]`.",
    "Respond with a JSON object in the following order of fields: `",
    "Respond with the corresponding output fields wrapped in XML tags `<",
    "It takes arguments {",
    "whose description is <desc>",
    "{'type': 'string'}",
    '", "description": "',
    '"parameters": {"type": "object", "properties": {',
    '{"type": "string"}',
    '{"type": "string", "description": "',
    '"}}, "required": ["',
    '}, "required": ["',
    '<tool_call>\n{"name": "',
    '", "arguments": {"',
    "}\n</tool_call>",
    "Your input fields are:",
    "Your output fields are:",
    "` (str):",
)
# Up to this width plain attention is faster than PyTorch's fused one, on two cores with AMX.
PLAIN_ATTENTION = 352
BATCH_TOKENS = 4096
STEPS = 13_000
KEPT_EVERY = 500
# A higher rate of Muon writes over what `start.py` begins with, and learns less for it.
LEARNING_RATE, MUON_RATE = 2e-3, 0.003


class Row(NamedTuple):
    """Token ids, and which of them the model learns to say."""

    ids: list[int]
    learned: list[bool]


def read(folder: Path) -> Iterator[dict[str, Any]]:
    """The corpus' conversations."""
    for file in sorted(folder.glob("conversations-*.jsonl")):
        with file.open() as lines:
            yield from map(json.loads, lines)


def make_tokenizer(folder: Path) -> Qwen2Tokenizer:
    """Byte-level BPE on the corpus; the fixed lines of the frameworks' prompts are words of their own."""
    phrases: list[str] = json.loads((folder / "phrases.json").read_text())

    def texts() -> Iterator[str]:
        for row in islice(read(folder), 12_000):
            for message in row["messages"]:
                yield from (it for it in message["content"].split("\n") if it.strip() not in phrases)
                yield json.dumps(message.get("tool_calls", ""))
            yield json.dumps(row["tools"])
        yield from ("system", "user", "assistant") * 500
        for word in vocabulary():
            yield f" {word}"
            yield word

    tokenizer = tokenizer_of(texts(), VOCABULARY)
    tokenizer.add_tokens([AddedToken(it, normalized=False, special=False) for it in (*FRAGMENTS, *phrases)])
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.model_max_length = MAX_POSITIONS
    return tokenizer


def vocabulary() -> Iterator[str]:
    """The words of the texts, often enough to be one token each."""
    lists = (words.NAMES, words.CITIES, words.JOBS, words.DAYS, words.MONTHS, words.COLOURS, words.PRODUCTS)
    lists += (words.GOODS, words.COUNTRIES, words.NUMBER_WORDS, words.TENS, words.NOUNS)
    for _ in range(20):
        for some in lists:
            yield from some
        for labels in (*words.SUBJECTS.values(), *words.JUDGEMENTS.values()):
            for label in labels:
                yield from (*label.names, *label.cues)


def parts_of(tokenizer: Qwen2Tokenizer, conversation: dict[str, Any]) -> list[tuple[str, bool]]:
    """The conversation as the chat template writes it, in parts: each answer, with its end, is learned."""
    messages, tools = conversation["messages"], conversation["tools"]
    parts, written = list[tuple[str, bool]](), ""

    def rendered(count: int, **more: Any) -> str:
        return tokenizer.apply_chat_template(messages[:count], tools=tools, tokenize=False, **more)

    for number in (at for at, it in enumerate(messages) if it.get("trained")):
        before = rendered(number, add_generation_prompt=True)
        after = rendered(number + 1).removesuffix("\n")
        parts += [(before[len(written) :], False), (after[len(before) :], True)]
        written = after
    return parts


def made_rows(tokenizer: Qwen2Tokenizer, conversations: Iterable[dict[str, Any]]) -> Iterator[Row]:
    """Their token ids. A part begins or ends at a special token, so it is encoded by itself."""
    left = iter(conversations)
    while some := [*islice(left, 2000)]:
        rows = [parts_of(tokenizer, it) for it in some]
        texts = [text for parts in rows for text, _ in parts]
        encoded = iter(tokenizer(texts, add_special_tokens=False)["input_ids"])
        for parts in rows:
            ids = [(next(encoded), is_learned) for _, is_learned in parts]
            yield Row([it for part, _ in ids for it in part], [is_it for part, is_it in ids for _ in part])


def batches(rows: list[Row], seed: int, tokens: int) -> Iterator[list[Row]]:
    """Endless batches of rows of one width of `WIDTHS`, of so many tokens with their padding.

    Each width has one number of rows, so that the model is compiled once for it.
    """
    rng = random.Random(seed)
    while True:
        made = list[list[Row]]()
        for least, width in itertools.pairwise((0, *WIDTHS)):
            fitting = [it for it in rows if least < len(it.ids) <= width]
            rng.shuffle(fitting)
            count = max(1, tokens // width)
            made += [fitting[at : at + count] for at in range(0, len(fitting) - count + 1, count)]
        rng.shuffle(made)
        yield from made


Hidden = Callable[[torch.Tensor], torch.Tensor]


def loss_of(model: PreTrainedModel, hidden: Hidden, rows: list[Row]) -> torch.Tensor:
    """Cross-entropy of the learned tokens, each answer counting alike; rows are padded on the right."""
    longest = max(len(row.ids) for row in rows)
    width = next(it for it in WIDTHS if it >= longest)
    ids_BL = torch.tensor([[*row.ids, *[0] * (width - len(row.ids))] for row in rows])
    learned_BL = torch.tensor([[*row.learned, *[False] * (width - len(row.ids))] for row in rows])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits_NV = model.lm_head(hidden(ids_BL)[:, :-1][learned_BL[:, 1:]])
    targets_N = ids_BL[:, 1:][learned_BL[:, 1:]]
    losses_N = torch.nn.functional.cross_entropy(logits_NV.float(), targets_N, reduction="none")
    weights_N = torch.tensor([it for row in rows for it in _weights(row.learned)])
    return (losses_N * weights_N).sum() / weights_N.sum()


def _weights(learned: list[bool]) -> Iterator[float]:
    """One for each answer, shared by its tokens: a long proposal counts no more than a label."""
    for is_learned, span in itertools.groupby(learned[1:]):
        count = len([*span])
        yield from [1 / count] * count if is_learned else ()


def optimizers(model: PreTrainedModel) -> list[tuple[torch.optim.Optimizer, float]]:
    """Muon for the layers' matrices, AdamW for the rest, each with its learning rate."""
    matrices = [it for name, it in model.named_parameters() if it.ndim == 2 and "embed" not in name]
    chosen = {id(it) for it in matrices}
    rest = [it for it in model.parameters() if id(it) not in chosen]
    muon = torch.optim.Muon(matrices, lr=MUON_RATE, momentum=0.95, weight_decay=0.01)
    adam = torch.optim.AdamW(rest, lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0)
    return [(muon, MUON_RATE), (adam, LEARNING_RATE)]


def train(model: PreTrainedModel, rows: list[Row], seed: int, steps: int, state: Path | None) -> float:
    """Train in place; returns the mean loss of the last hundred steps, 0 if all were done.

    `state`: a file with the training's state, written every few minutes; where it is, the training goes on.
    """
    used, losses, began = optimizers(model), list[float](), time.monotonic()
    optimized = [it for it, _ in used]
    first = snapshot.load(state, model, optimized) if state and state.is_file() else 0
    model.train()

    def forward(ids_BL: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model.model(input_ids=ids_BL).last_hidden_state

    compiled = torch.compile(forward, dynamic=False)
    torch._dynamo.config.cache_size_limit = 4 * len(WIDTHS)

    def hidden(ids_BL: torch.Tensor) -> torch.Tensor:
        model.set_attn_implementation("eager" if ids_BL.shape[1] <= PLAIN_ATTENTION else "sdpa")
        return compiled(ids_BL)

    for step, batch in islice(enumerate(batches(rows, seed, BATCH_TOKENS)), first, steps):
        for optimizer, rate in used:
            for group in optimizer.param_groups:
                group["lr"] = rate * warm_cosine(step, steps)
        loss = loss_of(model, hidden, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, _ in used:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if step % 100 == 0 or step == steps - 1:
            mean = sum(losses[-100:]) / len(losses[-100:])
            print(f"step {step:5d}  loss {mean:.3f}  {time.monotonic() - began:.0f} s", flush=True)
        if state and (step + 1) % KEPT_EVERY == 0:
            snapshot.save(state, model, optimized, step + 1)
    model.eval()
    return sum(losses[-100:]) / max(1, len(losses[-100:]))


def make(
    corpus: Path, out: Path, seed: int = SEED, steps: int = STEPS, state: Path | None = None
) -> dict[str, object]:
    """Make the model, write the folder, return its figures."""
    began = time.process_time()
    tokenizer = make_tokenizer(corpus)
    rows = [*made_rows(tokenizer, read(corpus))]
    kept = [it for it in rows if len(it.ids) <= WIDTHS[-1]]
    longest = max(len(it.ids) for it in rows)
    tokens = sum(len(it.ids) for it in kept)
    print(
        f"{len(tokenizer)} words, {len(kept)} rows of {tokens} tokens, the longest of {longest}", flush=True
    )
    model = make_model(tokenizer, seed)
    loss = train(model, kept, seed, steps, state)
    model.to(torch.bfloat16)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return {
        "seed": seed,
        "steps": steps,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "loss": round(loss, 4),
        "longest_prompt": longest,
        "cpu_seconds": round(time.process_time() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the embedded agent model.")
    parser.add_argument("--corpus", type=Path, required=True, help="folder that corpus.py wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--state", type=Path, help="file to keep the training in, and to go on from")
    options = parser.parse_args()
    figures = make(options.corpus, options.out, options.seed, options.steps, options.state)
    (options.out / "FIGURES.json").write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
