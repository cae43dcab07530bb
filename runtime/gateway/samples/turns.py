"""Which samples of a rollout are turns of one sequence (C2).

A turn joins when its prompt begins with the sequence so far, id for id: then one forward pass computes for
every turn exactly what a pass of its own would. Anything else (a template that rewrote an earlier answer, a
date that moved, text that tokenises differently) seals the sequence, and a new one begins.
Neighbours: selection.py asks, once per member of a group. Knows nothing of rewards or staleness.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from runtime.gateway.samples.journal import Exchange, Sample
from runtime.gateway.samples.sample_ref import SampleRef

# How a completion ends when the policy itself ended it; "length" and the like cut it.
_WHOLE = ("stop", "tool_calls")

Load = Callable[[SampleRef], tuple[Exchange, Sample]]


@dataclass(frozen=True)
class Turn:
    """A sample with its ids; `end` is where the next turn's prompt must take up."""

    ref: SampleRef
    prompt: list[int]
    completion: list[int]
    logprobs: list[float | None]
    temperature: float
    cut_off: bool

    @property
    def end(self) -> int:
        return len(self.prompt) + len(self.completion)

    def extends(self, before: Turn) -> bool:
        """Whether this prompt is the other's prompt and completion, exactly, and then perhaps more.

        A turn that was cut off stands alone, before and after: what the trainer does with it, it must be able
        to do without the others. One sequence has one temperature.
        """
        return (
            len(self.prompt) >= before.end
            and not (self.cut_off or before.cut_off)
            and self.temperature == before.temperature
            and self.prompt[: len(before.prompt)] == before.prompt
            and self.prompt[len(before.prompt) : before.end] == before.completion
        )

    def beside(self, other: Turn) -> bool:
        """Whether both answer the same question, so that neither could have gone on from the other."""
        return self.ref.request == other.ref.request or self.prompt == other.prompt


def load_turn(ref: SampleRef, load: Load) -> Turn:
    """Read a sample's ids."""
    exchange, sample = load(ref)
    return Turn(
        ref,
        exchange.prompts[sample.prompt],
        sample.completion_ids,
        sample.logprobs,
        exchange.temperature,
        sample.finish_reason not in _WHOLE,
    )


def join(refs: Sequence[SampleRef], load: Load) -> tuple[list[list[SampleRef]], int]:
    """Samples of one predictor of one rollout, in the order of the answers, as sequences of turns.

    Also how often a sequence was sealed: a sample that neither goes on from an earlier one nor stands beside
    one (another choice of the same request, the same prompt again) began anew.
    """
    if len(refs) < 2:
        return [[ref] for ref in refs], 0
    sequences: list[list[Turn]] = []
    sealed = 0
    for turn in (load_turn(ref, load) for ref in refs):
        open_ends = [sequence for sequence in sequences if turn.extends(sequence[-1])]
        if open_ends:
            max(open_ends, key=lambda sequence: sequence[-1].end).append(turn)
            continue
        earlier = [one for sequence in sequences for one in sequence]
        sealed += bool(earlier) and not any(turn.beside(one) for one in earlier)
        sequences.append([turn])
    return [[turn.ref for turn in sequence] for sequence in sequences], sealed
