"""A plain program with somebody else's SDK that is told to forgive nothing: `python many_rollouts.py COUNT`.

It rolls out so often, trains a step, and then waits to be ended.
"""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import openai

from launcher.client import connect, group

BASE = os.environ["LAUNCH_BASE_URL"].removesuffix("/v1")


def roll_out(number: int) -> str:
    """One completion; the id of its answer."""
    time.sleep(0.5)  # as a program that does something between two answers: ssh is to be killed often enough
    door = f"{BASE}/rollouts/r{number}/v1"
    key = os.environ["LAUNCH_API_KEY"]
    with openai.OpenAI(base_url=door, api_key=key, max_retries=0, timeout=300) as client:
        said = client.chat.completions.create(
            model=os.environ["LAUNCH_MODEL"],
            messages=[{"role": "user", "content": f"number {number}"}],
            max_tokens=48,
            temperature=1.0,
        )
    return said.id


def main(count: int) -> None:
    begun = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(roll_out, range(count)))
    print(f"answers={len(answers)} distinct={len(set(answers))}", flush=True)
    print(f"seconds={time.monotonic() - begun:.1f}", flush=True)
    rewards = {f"r{number}": float(number % 2) for number in range(8)}
    step = connect().step([group("g", rewards)], client_state={"place": 7})
    print(f"trained {step.id}: {step.state}", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main(int(sys.argv[1]))
