"""Routes messages with a real model by OpenAI's SDK, and trains on it; prints a JSON object a step.

    real_model_rollouts.py STEPS

All prompts of a step have the same instructions and examples, and differ at their ends. In the last step the
answers have room for one token.
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from openai import OpenAI

from launcher.client import connect, group

INSTRUCTIONS = """Sort each message into billing, delivery, returns or account. Answer with one word.
My card was charged twice. -> billing
The parcel never came. -> delivery
I want my money back for these shoes. -> returns
I cannot log in any more. -> account"""
MESSAGES = {
    "Why is there a fee on my invoice of the third of May?": "billing",
    "My order is two weeks late and nobody answers.": "delivery",
    "The jacket does not fit, how do I send it back?": "returns",
    "Please change the mail address that I sign in with.": "account",
    "You took money for a plan that I ended.": "billing",
    "The courier left the box in the rain.": "delivery",
    "It broke after a day and I want another one.": "returns",
    "I forgot my password and the link is dead.": "account",
}
ROLLOUTS = 8
ROOM = 32
run = connect()


def roll_out(message: str, room: int) -> tuple[str, str, float]:
    """The message, the rollout's id, its reward: the right word, and better where it comes alone."""
    rollout = run.new_rollout()
    with OpenAI(base_url=run.rollout_url(rollout), api_key=run.api_key, timeout=900) as client:
        asked: Any = [
            {"role": "system", "content": INSTRUCTIONS},
            {"role": "user", "content": f"{message} ->"},
        ]
        answer = client.chat.completions.create(
            model=run.model,
            messages=asked,
            max_tokens=room,
            temperature=1.0,
        )
    said = (answer.choices[0].message.content or "").lower()
    return message, rollout, float(MESSAGES[message] in said) + 1 / (1 + len(said))


def main(steps: int) -> None:
    with ThreadPoolExecutor(len(MESSAGES) * ROLLOUTS) as pool:
        for step in range(steps):
            begun = time.monotonic()
            asked = [message for message in MESSAGES for _ in range(ROLLOUTS)]
            room = ROOM if step < steps - 1 else 1
            done = list(pool.map(roll_out, asked, [room] * len(asked)))
            rolled_out = time.monotonic()
            groups = [
                group(f"{step}/{message}", {name: reward for about, name, reward in done if about == message})
                for message in MESSAGES
            ]
            status = run.step(groups)
            said = {
                "rollouts_seconds": rolled_out - begun,
                "training_seconds": time.monotonic() - rolled_out,
                "counts": status.counts.model_dump(),
                "metrics": status.metrics,
                "prefix_cache_hits": run.status().prefix_cache_hits,
            }
            print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
