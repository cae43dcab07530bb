"""Trains three steps of trajectories, from where its state says.

It waits for a line of its input at each word that it is given. With `DEATHS`, words by commas, each of its
lives is killed at the next of them.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from pathlib import Path

import httpx

from launcher.client import Trajectory, TrajectoryGroup, connect, gather_trajectory_groups

STEPS = 3
run = connect()


def _death() -> str:
    """Where this life ends."""
    deaths = os.environ.get("DEATHS", "")
    if not deaths:
        return ""
    lives = Path(f"{run.run_dir}/lives")
    before = len(lives.read_text()) if lives.exists() else 0
    lives.write_text("x" * (before + 1))
    return [*deaths.split(","), ""][before]


death = _death()


def say(word: str) -> None:
    print(word, flush=True)
    if word == death:
        os.kill(os.getpid(), signal.SIGKILL)
    if word in sys.argv:
        sys.stdin.readline()


def die_in_training() -> None:
    """As soon as the run has the step."""
    while not run.status().steps_queued:
        pass
    os.kill(os.getpid(), signal.SIGKILL)


async def rollout(client: httpx.AsyncClient, place: int) -> Trajectory:
    made = Trajectory(messages_and_choices=[{"role": "user", "content": "Well?"}], reward=float(place))
    body = {"model": "policy", "messages": made.messages(), "max_tokens": 8}
    answered = await client.post("/chat/completions", json=body)
    made.messages_and_choices.append(answered.json()["choices"][0])
    return made


async def gather() -> list[TrajectoryGroup]:
    headers = {"authorization": f"Bearer {run.api_key}"}
    async with httpx.AsyncClient(base_url=run.base_url, headers=headers, timeout=120) as client:
        return await gather_trajectory_groups([TrajectoryGroup(rollout(client, place) for place in range(2))])


say("begun")
for number in range(run.read_state().get("steps", 0), STEPS):
    groups = asyncio.run(gather())
    say(f"gathered {number}")
    if death == f"training {number}":
        threading.Thread(target=die_in_training, daemon=True).start()
    result = run.train(groups, state={"steps": number + 1})
    say(f"trained {number}: {result.trained}")
assert run.read_state() == {"steps": STEPS}
say("done")
