"""What a small run counts of a step: its samples by their tags, as the runtime does.

Neighbours: `played_text.py` finds the samples of members that are given as text; `small_run.py` takes the
step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from runtime.shared.schema import StepRequest
from tests.support.played_text import Matched, Request

FLAT = "no variance in its group"


def counts_of(
    step: StepRequest, asked: Sequence[Request], texts: Matched, drops_flat: bool
) -> dict[str, Any]:
    """Of a step's members among what was asked; where it has examples, those are all that is trained."""
    sampled: dict[tuple[str | None, str | None, str | None], int] = defaultdict(int)
    for it in asked:
        if it.tag("purpose") != "eval":
            sampled[it.tag("rollout"), it.tag("predictor"), it.tag("call")] += 1
    trained, dropped, samples, flat = 0, defaultdict[str, int](int), 0, 0
    for group in step.groups:
        is_flat = len({it.reward for it in group.members if it.reward is not None}) < 2
        flat += is_flat
        for member in group.members:
            if member.messages is not None:
                continue  # counted below
            wanted = member.predictor or group.predictor
            found = sum(
                count
                for (rollout, predictor, call), count in sampled.items()
                if rollout == member.rollout
                and predictor == wanted
                and (member.call is None or call == str(member.call))
            )
            samples += found
            if member.reward is None:
                dropped[member.failure or "no reward"] += max(1, found)
            elif is_flat and drops_flat:
                dropped[FLAT] += found
            else:
                trained += found
    by_text, unknown = texts.of(step.groups)
    samples, trained = samples + by_text + unknown, trained + by_text + unknown
    if step.examples:
        samples = trained = len(step.examples)
    return {
        "retokenised": unknown,
        "groups": len(step.groups),
        "members": sum(len(group.members) for group in step.groups),
        "samples": samples,
        "trained": trained,
        "groups_without_variance": flat,
        "dropped": dict(dropped),
    }
