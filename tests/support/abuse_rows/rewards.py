"""Rewards that teach nothing, as they are all the same."""

from __future__ import annotations

from tests.support import abuses as a
from tests.support.abuse_rows.row import Abuse, drops_flat
from tests.support.small_run import Asked


def same(asked: Asked) -> str:
    return a.GOOD


NOTHING_TO_LEARN = [
    Abuse(
        "every answer is worth the same: the training fails, as it taught nothing",
        answer=same,
        before=drops_flat,
        asked_for={"num_train_steps": 2},
        says=r"Nothing was trained in 2 steps\n"
        r"rollouts: 16 scored; samples left out: 16 no variance in its group",
        counts={"groups_without_variance": 4},
        exit=6,
    ),
    Abuse(
        "one example is worth the same throughout: its group is left out and counted",
        answer=lambda asked: same(asked) if "word 0" in asked.user else a.varied(asked),
        before=drops_flat,
        counts={"groups_without_variance": 1, "trained": 4, "dropped": {"no variance in its group": 4}},
    ),
]
