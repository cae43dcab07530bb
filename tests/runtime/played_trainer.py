"""The trainer, played: each step the gateway hands over gets a checkpoint of our making.

The checkpoint is built elsewhere and moved into place whole, so that whatever is wrong with it is wrong from
the first moment the gateway can see it.
"""

from __future__ import annotations

import os
import random
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runtime.shared.checkpoint import checkpoint_name
from tests.runtime.adapters import commit
from tests.runtime.gateway_process import Gateway
from tests.support.waiting import wait_until

# Of several blocks of the engine's prefix cache.
SEQUENCE = random.Random(11).choices(range(3, 290), k=180)
PROMPT = 150


class PlayedTrainer:
    """Takes the steps of one gateway."""

    def __init__(self, gateway: Gateway, model: Path, folder: Path) -> None:
        self.gateway = gateway
        self._model = model
        self._folder = folder

    def step(
        self,
        adapter: Path,
        *,
        version: int | None = None,
        afterwards: Callable[[Path], None] | None = None,
        **committed: Any,
    ) -> dict[str, Any]:
        """One step from rollouts to its end; its status. `committed` is for `adapters.commit`.

        `version`: another than the step's number. `afterwards`: done to the committed folder.
        """
        number = self._submit()
        batch = self.gateway.folder / "steps" / f"{number:06d}" / "batch.json"
        wait_until(batch.exists)
        root = self._folder / uuid.uuid4().hex
        done = commit(
            root, self._model, adapter, step=number, version=number if version is None else version,
            state={"counts": {}}, sequence=SEQUENCE, prompt=PROMPT, **committed,
        )  # fmt: skip
        if afterwards is not None:
            afterwards(done.folder)
        checkpoints = self.gateway.folder / "checkpoints"
        checkpoints.mkdir(exist_ok=True)
        os.rename(done.folder, checkpoints / checkpoint_name(number))
        return self.gateway.http.get(f"/slipway/steps/{number}?wait=60").json()

    def _submit(self) -> int:
        rollouts = [uuid.uuid4().hex for _ in range(2)]
        for rollout in rollouts:
            assert self.gateway.chat(rollout).status_code == 200
        members = [{"rollout": rollout, "reward": float(index)} for index, rollout in enumerate(rollouts)]
        group, kept = {"id": "g", "members": members}, {"overlong": "keep"}  # both may be cut off
        body = {"key": uuid.uuid4().hex, "groups": [group], "settings": kept}
        answer = self.gateway.http.post("/slipway/steps", json=body)
        assert answer.status_code == 202, answer.text
        return answer.json()["id"]
