"""The batch of a selection: the engine's own ids and logprobs, written sequence by sequence.

Neighbours: selection.py chooses the samples, handover.py gives the batch to the trainer, shared/batch.py is
its form on disk. Reads every token: in a thread. Judges nothing, tokenises nothing (C1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.gateway.samples.turns import SampledTurn
from runtime.gateway.steps.selection import Selection, Source
from runtime.shared.batch import GRAMMAR_SCHEMA, Batch
from runtime.shared.grammar import Grammar
from runtime.shared.statuses import StepCounts


@dataclass(frozen=True)
class _Row:
    """One sequence of the batch: arrays over its tokens, and its description."""

    tokens: NDArray[np.int32]
    sampled: NDArray[np.uint8]
    logprobs: NDArray[np.float32]
    temperature: float
    version: int
    truncated: bool
    described: dict[str, Any]


def build(selection: Selection, store: Source, meta: dict[str, Any]) -> Batch:
    """The batch of a selection: the engine's own ids and logprobs, copied. `meta` is added to its JSON."""
    grammars: dict[Grammar, int] = {}
    rows = [_row([store.load_turn(ref) for ref in turns], grammars) for turns, _ in selection.sequences]
    sampled = np.concatenate([row.sampled for row in rows])
    counts = selection.counts.model_copy(update={"sampled_tokens": int(sampled.sum())})
    return Batch(
        tokens=np.concatenate([row.tokens for row in rows]),
        sampled=sampled,
        logprobs=np.concatenate([row.logprobs for row in rows]),
        offsets=np.cumsum([0, *(len(row.tokens) for row in rows)], dtype=np.int64),
        temperature=np.asarray([row.temperature for row in rows], np.float32),
        version=np.asarray([row.version for row in rows], np.int64),
        truncated=np.asarray([row.truncated for row in rows], np.uint8),
        member=np.asarray([member for _, member in selection.sequences], np.int64),
        reward=np.asarray([member.reward for _, member in selection.members], np.float32),
        group=np.asarray([group for group, _ in selection.members], np.int64),
        meta=meta | _meta(selection, rows, counts) | _described_grammars(grammars),
    )


def _row(turns: list[SampledTurn], grammars: dict[Grammar, int]) -> _Row:
    """A sequence's turns, laid down in the ids of its last. `grammars`: the step's so far, by number."""
    last = turns[-1]
    tokens = np.asarray(last.prompt + last.completion, np.int32)
    sampled = np.zeros(len(tokens), np.uint8)
    logprobs = np.zeros(len(tokens), np.float32)
    for turn in turns:
        sampled[len(turn.prompt) : turn.end] = 1
        logprobs[len(turn.prompt) : turn.end] = np.asarray(turn.logprobs, np.float32)
    tags = turns[0].ref.tags
    described = {
        "id": turns[0].ref.id,
        "rollout": tags.rollout,
        "predictor": tags.predictor,
        "call": tags.call,
        "turns": [_segment(turn) | _grammar(turn, grammars) for turn in turns],
    }
    oldest = min(turn.ref.version for turn in turns)
    return _Row(tokens, sampled, logprobs, last.temperature, oldest, last.truncated, described)


def _meta(selection: Selection, rows: list[_Row], counts: StepCounts) -> dict[str, Any]:
    return {
        "groups": [{"id": group.id, "predictor": group.predictor} for group in selection.groups],
        "members": [
            {"rollout": member.rollout, "predictor": member.predictor, "call": member.call, "group": group}
            for group, member in selection.members
        ],
        "samples": [row.described for row in rows],
        "lags": {str(version): lag for version, lag in sorted(selection.staleness.items())},
        "counts": counts.model_dump(),
    }


def _grammar(turn: SampledTurn, grammars: dict[Grammar, int]) -> dict[str, int]:
    """The number of the grammar that held a turn: requests of a program have the same few, of any size."""
    return {} if turn.grammar is None else {"grammar": grammars.setdefault(turn.grammar, len(grammars))}


def _described_grammars(grammars: dict[Grammar, int]) -> dict[str, Any]:
    if not grammars:
        return {}
    return {"schema": GRAMMAR_SCHEMA, "grammars": [grammar.as_json() for grammar in grammars]}


def _segment(turn: SampledTurn) -> dict[str, Any]:
    """Where a turn's sampled tokens lie in its sequence, and which policy version sampled them (C38)."""
    return {
        "id": turn.ref.id,
        "call": turn.ref.tags.call,
        "version": turn.ref.version,
        "start": len(turn.prompt),
        "end": turn.end,
    }
