"""A user's program that trains two steps, says a held-out score before, between and after, and waits to be
looked at: `train_and_wait.py NAME…`, the variables with a canary that it may have been given.
"""

from __future__ import annotations

import os
import sys

import openai

from launcher.client import Session, connect, group
from launcher.client.request_bodies import StepSettings, Validation
from tests.support.waiting import wait_until

STEPS = 2
LOOKED_AT_SECONDS = 600.0


def train(run: Session) -> None:
    rewards: dict[str, float | str | None] = {}
    for number in range(4):
        rollout = run.new_rollout()
        client = openai.OpenAI(base_url=run.rollout_url(rollout), api_key=run.api_key)
        client.chat.completions.create(
            model=run.model, messages=[{"role": "user", "content": "the red cat"}], max_tokens=24
        )
        rewards[rollout] = float(number)
    assert run.step([group("one", rewards)], settings=StepSettings(overlong="keep")).state == "published"


def main() -> None:
    run = connect()
    assert run.run_dir is not None
    run.validated(Validation(step=0, score=0.1))
    for step in range(1, STEPS + 1):
        train(run)
        run.validated(Validation(step=step, score=step / 4))
    (run.run_dir / "trained").touch()
    wait_until((run.run_dir / "looked-at").exists, LOOKED_AT_SECONDS, "a look")
    given = sorted(name for name, value in os.environ.items() if "canary" in value)
    raise SystemExit(0 if given == sorted(sys.argv[1:]) else f"given: {given}")


if __name__ == "__main__":
    main()
