"""A user's program, for runs of `small_launch.py`: asks in every way, trains a step, goes on where it was.

    python -m tests.support.small_program STEPS [hold]      (so many in this life; 0: until it is ended)

With `hold` it then waits to be ended.

What it was answered is in `words.jsonl` of the run's folder.
"""

from __future__ import annotations

import json
import sys
import time

from launcher.client import connect, group
from launcher.client.session import Session


def ask(session: Session, **body: bool) -> str:
    """One completion; the text of its answer."""
    headers = {"content-type": "application/json"}
    answer = session.connection.wire.send("POST", "/v1/chat/completions", json.dumps(body).encode(), headers)
    answer.raise_for_status()
    return answer.text


def main(steps: int, hold: bool) -> None:
    session = connect()
    assert session.run_dir is not None
    done = (session.client_state or {}).get("done", 0)
    last = done + steps if steps else sys.maxsize
    while done < last:
        words = [ask(session), ask(session, cut=True), ask(session, stream=True)]
        done += 1
        trained = session.step([group("g", {"r": 1.0})], key=f"step-{done}", client_state={"done": done})
        with (session.run_dir / "words.jsonl").open("a") as file:
            file.write(json.dumps({"step": trained.id, "words": words}) + "\n")
        if not steps:
            time.sleep(0.02)
    while hold:
        time.sleep(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), "hold" in sys.argv[2:])
