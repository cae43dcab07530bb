"""Joins samples of a rollout into sequences of turns (C2).

A turn joins when its prompt begins with the sequence so far, id for id: then one forward pass computes for
every turn exactly what a pass of its own would. Anything else (a template that rewrote an earlier answer, a
date that moved, text that tokenises differently) ends the sequence, and a new one begins; the reason is
counted. Neighbours: samples.py reads turns; selection.py asks, once per member of a group;
completions/prefix_continuation.py asks engines for prompts that go on. Knows nothing of rewards or staleness.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from runtime.gateway.samples.sample_ref import SampleRef
from runtime.shared.grammar import Grammar

# How a completion ends when the policy itself ended it; "length" and the like cut it.
COMPLETE_REASONS = ("stop", "tool_calls")
# The reason why a turn began a sequence of its own, if its request has none.
CUT_OFF = "cut off"
OTHER_TEMPERATURE = "other temperature"
REWRITTEN = "history rewritten"
ANOTHER = "another conversation"


@dataclass(frozen=True)
class SampledTurn:
    """A sample with its ids; `end` is where the next turn's prompt must take up."""

    ref: SampleRef
    prompt: list[int]
    completion: list[int]
    logprobs: list[float | None]
    temperature: float
    truncated: bool
    # Why its request was not made to go on from an earlier turn.
    apart: str | None = None
    # What the engine held its answer to.
    grammar: Grammar | None = None

    @property
    def end(self) -> int:
        return len(self.prompt) + len(self.completion)

    def extends(self, before: SampledTurn) -> bool:
        """Whether this prompt is the other's prompt and completion, exactly, and then perhaps more.

        A turn that was cut off stands alone, before and after: the trainer must be able to treat it without
        the others. One sequence has one temperature.
        """
        return (
            len(self.prompt) >= before.end
            and not (self.truncated or before.truncated)
            and self.temperature == before.temperature
            and self._has_all_of(before)
        )

    def split_reason(self, before: SampledTurn) -> str:
        """The reason this turn does not extend the other."""
        if self._has_all_of(before):
            return CUT_OFF if self.truncated or before.truncated else OTHER_TEMPERATURE
        if self.apart is not None:
            return self.apart
        return REWRITTEN if self.prompt[: len(before.prompt)] == before.prompt else ANOTHER

    def _has_all_of(self, before: SampledTurn) -> bool:
        """Whether this prompt begins with the other's prompt and completion."""
        return (
            self.prompt[: len(before.prompt)] == before.prompt
            and self.prompt[len(before.prompt) : before.end] == before.completion
        )

    def is_sibling_of(self, other: SampledTurn) -> bool:
        """Whether both answer the same question, so that neither could have continued the other."""
        return self.ref.request == other.ref.request or self.prompt == other.prompt


def join(
    refs: Sequence[SampleRef], load_turn: Callable[[SampleRef], SampledTurn]
) -> tuple[list[list[SampleRef]], Counter[str]]:
    """Samples of one predictor of one rollout, in the order of the answers, as sequences of turns.

    Also how often a sequence was sealed, by the reason: a sample that neither goes on from an earlier one nor
    stands beside one (another choice of the same request, the same prompt again) began anew.
    """
    sealed: Counter[str] = Counter()
    if len(refs) < 2:
        return [[ref] for ref in refs], sealed
    sequences: list[list[SampledTurn]] = []
    for turn in map(load_turn, refs):
        open_ends = [sequence for sequence in sequences if turn.extends(sequence[-1])]
        if open_ends:
            max(open_ends, key=lambda sequence: sequence[-1].end).append(turn)
            continue
        earlier = [one for sequence in sequences for one in sequence]
        if earlier and not any(turn.is_sibling_of(one) for one in earlier):
            sealed[turn.split_reason(_nearest(turn, earlier))] += 1
        sequences.append([turn])
    return [[turn.ref for turn in sequence] for sequence in sequences], sealed


def _nearest(turn: SampledTurn, earlier: Sequence[SampledTurn]) -> SampledTurn:
    """The latest earlier turn of those whose ids this prompt has the most of."""
    return max(reversed(earlier), key=lambda before: _shared(turn.prompt, before))


def _shared(prompt: list[int], before: SampledTurn) -> int:
    """How many ids a prompt and an earlier turn both begin with, as far as it tells turns apart."""
    if prompt[: len(before.prompt)] != before.prompt:
        return 0
    return len(before.prompt) + (prompt[len(before.prompt) : before.end] == before.completion)
