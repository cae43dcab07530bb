"""Groups for a step: of rollouts that have their rewards with them, or of rewards by rollout id.

Neighbours: `steps.py` sends them, `schema.py` has their form. Knows nothing of a rollout's making.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, Protocol, cast

from launcher.client.request_bodies import MAX_METRICS, Group, Member


class RewardedRollout(Protocol):
    """A rollout that has its reward with it, as `Session.rollout` gives."""

    def member(self) -> Member: ...


def group(
    group_id: str,
    rewards: Mapping[str, float | str | None] | Iterable[RewardedRollout],
    predictor: str | None = None,
) -> Group:
    """One group, of rollouts that have their rewards, or of rollout id → reward.

    A text instead of a number excludes the rollout and is the reason (C22).
    """
    if isinstance(rewards, Mapping):
        by_id = cast("Mapping[str, float | str | None]", rewards)
        members = [_member(rollout, it, predictor) for rollout, it in by_id.items()]
    else:
        members = [it.member() for it in rewards]
    return Group(id=group_id, predictor=predictor, members=members)


def _member(rollout: str, reward: float | str | None, predictor: str | None) -> Member:
    if reward is None or isinstance(reward, str):
        return Member(rollout=rollout, predictor=predictor, failure=reward or "no reward")
    return Member(rollout=rollout, predictor=predictor, reward=float(reward))


def finite(metrics: Mapping[str, Any]) -> dict[str, float]:
    """A rollout's own figures as the run takes them: numbers alone, so many at most."""
    found: dict[str, float] = {}
    for name, value in metrics.items():
        with suppress(TypeError, ValueError, OverflowError):
            if math.isfinite(figure := float(value)) and len(found) < MAX_METRICS:
                found[str(name)[:64] or "figure"] = figure
    return found
