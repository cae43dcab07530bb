"""Teaches a small model to answer a board as the crowd of `boards.py` does, and writes its folder.

The loss of a turn is the cross-entropy to the answers of the whole crowd, not to the one given answer, so
that few boards are enough. Neighbours: `players.py` is its command, `make.py` lends the chat format. Knows
nothing of winning.
"""

from __future__ import annotations

import functools
import time
from itertools import cycle, islice
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from examples.tiny_model import boards
from examples.tiny_model.make import END, START, settings_of, tokenizer_of, warm_cosine

SEED = 0


class Phase(NamedTuple):
    """A stretch of steps. Single boards come first: a board that stands alone is learned sooner."""

    steps: int
    whole: bool
    batches: dict[str, int]
    """Conversations of a step by game, in turns."""


PHASES = (
    Phase(steps=150, whole=False, batches={"tic-tac-toe": 48, "2048": 32}),
    Phase(steps=80, whole=True, batches={"tic-tac-toe": 24, "2048": 6}),
)
LEARNING_RATE = 3e-3
VOCABULARY = 400
# A whole game of 2048 fits.
MAX_POSITIONS = 2048
# The number of games whose boards test the share of allowed moves.
JUDGED = 60


class Row(NamedTuple):
    """A conversation's ids; at each place the target: an id, or a turn's whole crowd."""

    ids: list[int]
    targets: list[tuple[int, dict[int, float]]]


def made_row(tokenizer: Qwen2Tokenizer, play: boards.Play) -> Row:
    """The conversation as the chat template writes it."""
    ids = [*_encoded(tokenizer, f"{START}system\n{play.system}{END}\n")]
    targets: list[tuple[int, dict[int, float]]] = []
    end = tokenizer.convert_tokens_to_ids(END)
    for turn, choice in zip(play.turns, play.chosen, strict=True):
        ids += tokenizer.encode(f"{START}user\n{turn.shown}{END}\n{START}assistant\n")
        crowd = {_only(tokenizer, answer): share for answer, share in turn.answers.items()}
        targets += [(len(ids) - 1, crowd), (len(ids), {end: 1.0})]
        ids += [_only(tokenizer, choice), end, *_encoded(tokenizer, "\n")]
    return Row(ids, targets)


def _only(tokenizer: Qwen2Tokenizer, word: str) -> int:
    # as it stands in the board: the model answers with the word that it reads there
    (token,) = _encoded(tokenizer, f" {word}")
    return token


@functools.lru_cache
def _encoded(tokenizer: Qwen2Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text))


def make_tokenizer(seed: int) -> Qwen2Tokenizer:
    """A word of the games is one token."""
    texts: list[str] = []
    for game in boards.GAMES:
        for play in islice(boards.plays(seed, game), 300):
            texts.append(f"{START}system\n{play.system}{END}")
            texts += [f"{START}user\n{turn.shown}{END}" for turn in play.turns]
            texts += [f"{START}assistant\n {answer}{END}" for answer in (*play.chosen, *boards.DIRECTIONS)]
    return tokenizer_of(texts, VOCABULARY)


def make_model(tokenizer: Qwen2Tokenizer, seed: int) -> PreTrainedModel:
    """Three layers of width 96, heads of 32 (the least that vLLM's CPU attention takes)."""
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            **settings_of(tokenizer),
            hidden_size=96,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=3,
            num_key_value_heads=3,
            max_position_embeddings=MAX_POSITIONS,
            initializer_range=0.1,
        )
    )


def loss_of(model: PreTrainedModel, rows: list[Row]) -> torch.Tensor:
    """Mean over all places of the cross-entropy to the crowd's answers there."""
    width = max(len(row.ids) for row in rows)
    ids_BL = torch.zeros(len(rows), width, dtype=torch.long)
    mask_BL = torch.zeros_like(ids_BL)
    places = [(number, at, crowd) for number, row in enumerate(rows) for at, crowd in row.targets]
    wanted_NV = torch.zeros(len(places), model.config.vocab_size)
    for number, row in enumerate(rows):
        ids_BL[number, : len(row.ids)] = torch.tensor(row.ids)
        mask_BL[number, : len(row.ids)] = 1
    for place, (_, _, crowd) in enumerate(places):
        for token, share in crowd.items():
            wanted_NV[place, token] = share
    hidden_BLD = model.model(input_ids=ids_BL, attention_mask=mask_BL).last_hidden_state
    hidden_ND = hidden_BLD[[it[0] for it in places], [it[1] for it in places]]
    return torch.nn.functional.cross_entropy(model.lm_head(hidden_ND), wanted_NV)


def train(model: PreTrainedModel, tokenizer: Qwen2Tokenizer, seed: int, phases: tuple[Phase, ...]) -> float:
    """Train in place; returns the loss of the last step."""
    plays = {game: boards.plays(seed, game) for game in boards.GAMES}
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = [
        (phase, game) for phase in phases for _, game in zip(range(phase.steps), cycle(phase.batches))
    ]
    model.train()
    loss = torch.zeros(())
    for step, (phase, game) in enumerate(schedule):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * warm_cosine(step, len(schedule))
        some = islice(plays[game], phase.batches[game])
        loss = loss_of(model, [made_row(tokenizer, it if phase.whole else it.one_turn()) for it in some])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 30 < len(phase.batches) or step == len(schedule) - 1:
            print(f"step {step:4d}  {game}  loss {loss.item():.3f}", flush=True)
    model.eval()
    return loss.item()


@torch.no_grad()
def allowed(model: PreTrainedModel, tokenizer: Qwen2Tokenizer, seed: int) -> dict[str, float]:
    """How likely an answer is an allowed move, by game."""
    found: dict[str, float] = {}
    for game in boards.GAMES:
        shares: list[float] = []
        for play in islice(boards.plays(seed, game), JUDGED):
            row = made_row(tokenizer, play)
            chances_LV = model(input_ids=torch.tensor([row.ids])).logits[0].softmax(-1)
            shares += [chances_LV[at, [*crowd]].sum().item() for at, crowd in row.targets[::2]]
        found[game] = round(sum(shares) / len(shares), 4)
    return found


def make(out: Path, seed: int = SEED, phases: tuple[Phase, ...] = PHASES) -> dict[str, object]:
    """Make the model, write the folder, return its figures."""
    began = time.process_time()
    tokenizer = make_tokenizer(seed)
    model = make_model(tokenizer, seed)
    loss = train(model, tokenizer, seed, phases)
    model.to(torch.bfloat16)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return {
        "seed": seed,
        "steps": sum(phase.steps for phase in phases),
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "loss": round(loss, 4),
        "cpu_seconds": round(time.process_time() - began, 1),
        "allowed": allowed(model.float(), tokenizer, seed + 1),
    }
