"""A user's program in a life whose machine was lost: `python after_a_loss.py ROLLOUT…`.

What the lost machine sampled cannot be trained, what this one samples can. `after.json` of the run's folder
has what was answered.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from openai import OpenAI

from launcher.client import Rewound, Session, connect, group
from launcher.client.request_bodies import StepSettings
from launcher.client.schema import StepStatus


def train_the_lost(session: Session, rollouts: list[str]) -> dict[str, Any]:
    """How rollouts of the lost machine are refused."""
    try:
        session.step([group("g", {rollout: float(at) for at, rollout in enumerate(rollouts)})])
    except Rewound as lost:
        return {"step": lost.error["step"], "client_state": lost.client_state, "status": lost.status}
    raise SystemExit("what the lost machine sampled was trained")


def train_again(session: Session, client_state: dict[str, Any] | None) -> StepStatus:
    rewards: dict[str, float | str | None] = {}
    for at in range(4):
        rollout = session.new_rollout()
        client = OpenAI(base_url=session.rollout_url(rollout), api_key=session.api_key)
        client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "a"}], max_tokens=4
        )
        rewards[rollout] = float(at)
    kept = StepSettings(overlong="keep")  # its answers are cut off
    return session.step([group("again", rewards)], client_state=client_state, settings=kept)


def main(rollouts: list[str]) -> None:
    session = connect()
    said = train_the_lost(session, rollouts)
    status = train_again(session, said["client_state"])
    said |= {"trained": status.counts.trained, "version": status.version}
    Path(os.environ["LAUNCH_RUN_DIR"], "after.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(sys.argv[1:])
