"""Trains three steps of trajectories that are rolled out ahead, from where its state says.

It says the numbers of the groups of each step, and waits for a line of its input at each word that it is
given.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator

import httpx

from launcher.client import Trajectory, TrajectoryGroup, connect, gather_ahead

STEPS = 3
run = connect()


def say(word: str) -> None:
    print(word, flush=True)
    if word.partition(":")[0] in sys.argv:
        sys.stdin.readline()


async def rollout(client: httpx.AsyncClient, number: int, member: int) -> Trajectory:
    asked = {"role": "user", "content": f"group {number}"}
    made = Trajectory(messages_and_choices=[asked], reward=float(member))
    body = {"model": "policy", "messages": made.messages(), "max_tokens": 8}
    answered = await client.post("/chat/completions", json=body)
    made.messages_and_choices.append(answered.json()["choices"][0])
    return made


def scenarios(client: httpx.AsyncClient) -> Iterator[TrajectoryGroup]:
    for number in range(100):
        yield TrajectoryGroup(rollout(client, number, member) for member in range(2))  # type: ignore[misc]


async def main() -> None:
    headers = {"authorization": f"Bearer {run.api_key}"}
    place = run.read_state().get("place")
    async with httpx.AsyncClient(base_url=run.base_url, headers=headers, timeout=120) as client:
        given = scenarios(client)
        async for groups in gather_ahead(run, given, per_step=2, steps=STEPS, staleness=1, place=place):
            say(f"gathered {groups.place['steps']}: {groups.numbers}")
            result = await run.train_async(groups, state={"place": groups.place})
            say(f"trained {groups.place['steps']}: {result.trained}")


say("begun")
asyncio.run(main())
say("done")
