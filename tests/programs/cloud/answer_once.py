"""A user's program that asks the policy once and then waits to be looked at."""

from __future__ import annotations

import openai

from launcher.client import connect
from tests.support.waiting import wait_until

LOOKED_AT_SECONDS = 600.0


def main() -> None:
    run = connect()
    assert run.run_dir is not None
    client = openai.OpenAI(base_url=run.base_url, api_key=run.api_key)
    client.chat.completions.create(
        model=run.model, messages=[{"role": "user", "content": "the red cat"}], max_tokens=8
    )
    (run.run_dir / "answered").touch()
    wait_until((run.run_dir / "looked-at").exists, LOOKED_AT_SECONDS, "a look")


if __name__ == "__main__":
    main()
