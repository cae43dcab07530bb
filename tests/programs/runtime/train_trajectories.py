"""Trains three steps of trajectories, from where its state says; waits at the words that it is given."""

from __future__ import annotations

import asyncio
import sys

import httpx

from launcher.client import Trajectory, TrajectoryGroup, connect, gather_trajectory_groups

STEPS = 3
run = connect()


def say(word: str) -> None:
    print(word, flush=True)
    if word in sys.argv:
        sys.stdin.readline()


async def rollout(client: httpx.AsyncClient, place: int) -> Trajectory:
    made = Trajectory(messages_and_choices=[{"role": "user", "content": "Well?"}], reward=float(place))
    body = {"model": "policy", "messages": made.messages()}
    answered = await client.post("/chat/completions", json=body)
    made.messages_and_choices.append(answered.json()["choices"][0])
    return made


async def gather() -> list[TrajectoryGroup]:
    headers = {"authorization": f"Bearer {run.api_key}"}
    async with httpx.AsyncClient(base_url=run.base_url, headers=headers, timeout=30) as client:
        return await gather_trajectory_groups([TrajectoryGroup(rollout(client, place) for place in range(2))])


say("begun")
for number in range(run.read_state().get("steps", 0), STEPS):
    groups = asyncio.run(gather())
    say(f"gathered {number}")
    result = run.train(groups, state={"steps": number + 1})
    say(f"trained {number}: {result.trained}")
assert run.read_state() == {"steps": STEPS}
say("done")
