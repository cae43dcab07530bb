"""Scores a group of the installed openpipe-art by our RULER, and prints what came back as JSON.

python ruler_groups.py JUDGE_URL KEY
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import art
from openai.types.chat.chat_completion import Choice

from launcher.client.ruler import Tries, ruler_score_group
from launcher.client.trajectories.members import group_of


def choice(text: str, sample: str) -> Choice:
    message = {"role": "assistant", "content": text}
    named = {"slipway": {"sample": sample, "version": 3}}
    return Choice.model_validate({"finish_reason": "stop", "index": 0, "message": message, **named})


def trajectory(worth: float, sample: str) -> art.Trajectory:
    asked = {"role": "user", "content": "Sum this up."}
    return art.Trajectory(
        messages_and_choices=[asked, choice(f"worth {worth:.4f}", sample)],
        reward=0.5,
        metrics={"turns": 1},
        metadata={"letter": sample},
    )


def shown(group: Any) -> dict[str, Any]:
    made, dropped = group_of(group, "g")
    return {
        "type": f"{type(group).__module__}.{type(group).__name__}",
        "rewards": [it.reward for it in group.trajectories],
        "metrics": [it.metrics for it in group.trajectories],
        "metadata": [it.metadata for it in group.trajectories],
        "exceptions": [it.type for it in group.exceptions],
        "own": {name: getattr(group, name, None) for name in ("metadata", "metrics")},
        "members": None if made is None else [[it.samples, it.reward] for it in made.members],
        "dropped": dropped,
    }


async def main() -> None:
    url, key = sys.argv[1:]
    given = art.TrajectoryGroup(
        [trajectory(0.25, "a"), trajectory(1.0, "b"), trajectory(0.25, "c")], exceptions=[ValueError("no")]
    )
    scored = await ruler_score_group(given, (url, key, "played-judge"))
    left_out = await ruler_score_group(given, (url, key, "silent"), tries=Tries(1))
    print(json.dumps({name: shown(it) for name, it in
                      {"given": given, "scored": scored, "left_out": left_out}.items()}))  # fmt: skip


asyncio.run(main())
