"""A user's program that trains a step, waits to be looked at, and was given no secret of `.env`."""

from __future__ import annotations

import os

import openai

from launcher.client import Session, connect, group
from tests.support.waiting import wait_until

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
    assert run.step([group("one", rewards)]).state == "published"


def main() -> None:
    run = connect()
    assert run.run_dir is not None
    train(run)
    (run.run_dir / "trained").touch()
    wait_until((run.run_dir / "looked-at").exists, LOOKED_AT_SECONDS, "a look")
    given = [name for name, value in os.environ.items() if "canary" in value]
    raise SystemExit(0 if given == ["SHELL_API_KEY"] else f"given: {given}")


if __name__ == "__main__":
    main()
