"""The few lengths that rows have on a GPU, where kernels are compiled for each length.

Neighbours: `trainer/packing.py` lays rows out by it, `memory/planning.py` plans their memory. Pure: no torch.

    budget/8   budget/4   budget/2   budget   1.25   1.5   1.75   2   2.5   3   3.5   4   5 …   x budget
"""

from __future__ import annotations

import math

# The kernels' block size; below it, how often the budget is halved for a short row.
BLOCK = 128
_HALVINGS = 3
# Past the budget a row is one long sample, and its unfilled part costs memory: at most a fifth of it.
_STEPS_PER_DOUBLING = 4


def whole_blocks(budget: int) -> int:
    """A budget as fixed rows keep to it."""
    return max(1, budget // BLOCK) * BLOCK


def fixed_length(needed: int, budget: int) -> int:
    """The smallest of the few lengths of fixed rows that has so many places, in whole blocks."""
    length = budget / 2**_HALVINGS
    while (blocks := math.ceil(length / BLOCK)) * BLOCK < needed:
        length += length if length < budget else _step(length, budget)
    return blocks * BLOCK


def _step(length: float, budget: int) -> float:
    return budget * 2 ** int(math.log2(length / budget)) / _STEPS_PER_DOUBLING
