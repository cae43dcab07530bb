"""A user's program that goes on when it is told to: `python work_when_told.py BYTES [ask]`.

With `ask` it asks one question first, whose answer the runtime holds back, and says how that ended. Then it
waits for `train` in the run's folder, trains a step with files of so many bytes, waits for `end`, and ends.
The runtime is that of `tests/support/small_runtime.py`.
"""

from __future__ import annotations

import os
import sys
import time

import httpx

from launcher.client import connect, group
from launcher.client.session import Session
from tests.support.waiting import wait_until

TOLD_SECONDS = 1200.0


def ask(session: Session) -> None:
    """Once: nothing is forgiven, and nothing asked again."""
    begun = time.monotonic()
    answer = httpx.post(
        f"{session.base_url}/chat/completions",
        json={"held": True},
        headers={"authorization": f"Bearer {session.api_key}"},
        timeout=TOLD_SECONDS,
        trust_env=False,
    )
    took, patience = time.monotonic() - begun, os.environ["LAUNCH_PATIENCE_SECONDS"]
    print(f"answered {answer.status_code} after {took:.1f} s, patience {patience} s", flush=True)


def main(size: int, asks: bool) -> None:
    session = connect()
    folder = session.run_dir
    assert folder is not None
    if asks:
        ask(session)
    wait_until((folder / "train").exists, TOLD_SECONDS, "the word to train")
    step = session.step([group("g", {"r": 1.0})], client_state={"bytes": size})
    print(f"trained {step.id}: {step.state}", flush=True)
    wait_until((folder / "end").exists, TOLD_SECONDS, "the word to end")


if __name__ == "__main__":
    main(int(sys.argv[1]), "ask" in sys.argv[2:])
