"""Chooses the examples of a step: epochs in an order that depends on the seed and the epoch alone.

Neighbours: `grpo.py` asks for the examples of each step. The place in the data is one number, the steps
taken, so a resumed run goes on with the same examples as without the break (C43). Knows nothing of examples.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class EpochSampler:
    """`size` examples, `per_step` of them a step; each epoch takes every example once."""

    size: int
    per_step: int
    seed: int

    def __post_init__(self) -> None:
        if self.size < 1 or self.per_step < 1:
            raise ValueError("an epoch needs at least one example, and a step too")

    def at(self, step: int) -> list[int]:
        """The examples of step `step` (0 is the first); an epoch's end may fall inside a step."""
        places = range(step * self.per_step, (step + 1) * self.per_step)
        return [_order(self.size, self.seed, place // self.size)[place % self.size] for place in places]

    def extra_examples(self, step: int, count: int) -> list[int]:
        """Examples to roll out besides those of step `step`, in an order of its own; these come again last.

        Fewer are the beginning of more, and it depends on the seed and the step alone: a resumed run takes
        the same (C43).
        """
        own = self.at(step)
        shuffled = random.Random(f"{self.seed}/others/{step}")
        others = [it for it in range(self.size) if it not in set(own)]
        again = list(dict.fromkeys(own))
        shuffled.shuffle(others)
        shuffled.shuffle(again)
        order = others + again
        return [order[place % len(order)] for place in range(count)]

    def epoch(self, step: int) -> int:
        """The epoch that step `step` begins in."""
        return step * self.per_step // self.size


@lru_cache(maxsize=4)
def _order(size: int, seed: int, epoch: int) -> list[int]:
    order = list(range(size))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order
