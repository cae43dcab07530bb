"""Trains steps that a loop has sent, with the real gateway's queue and the real trainer; no engine.

    python -m tests.runtime.replayed TRACES FOLDER

TRACES: by name, the steps of a loop as `tests/support/pretend_rollouts.py` notes them. What a rollout was
answered is made up here of rollout, predictor, call and version alone, recorded by the gateway's own store,
chosen and laid down by its queue, and trained by the recipe. FOLDER/NAME is the state of that run; stdout has
a line for each step.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from runtime.gateway.samples.samples import SampleStore
from runtime.gateway.steps.queue import StepQueue
from runtime.recipes.grpo_lora import GRPOLoRARecipe
from runtime.shared.batch import step_folder
from runtime.shared.checkpoint import Checkpoint, CheckpointStore
from runtime.shared.schema import StepRequest
from runtime.shared.statuses import StepStatus
from tests.runtime import recipe_here
from tests.runtime.recorded import answer, asked, choice, record
from tests.runtime.trainer_fixtures import EOS, VOCABULARY
from tests.support.waiting import wait_until_async

_SECONDS = 60.0


def sample(store: SampleStore, version: int, rollout: str, predictor: str, call: int, cut_off: bool) -> None:
    """Record what this call of this rollout was answered by this version: always the same."""
    place = rollout.partition("-")[2]
    example = place.rpartition("-")[0]
    prompt = _drawn(f"{example}/{predictor}/{call}").integers(3, VOCABULARY, 12).tolist()
    random = _drawn(f"{place}/{predictor}/{call}/{version}")
    ids = random.integers(3, VOCABULARY, random.integers(2, 9)).tolist()
    ids = ids if cut_off else [*ids, EOS]
    said = choice(ids, random.normal(-4.6, 0.2, len(ids)).tolist())
    said["finish_reason"] = "length" if cut_off else "stop"
    tags = {"x_slipway_predictor": predictor, "x_slipway_call": str(call)}
    record(store, asked(rollout=rollout, **tags), answer(prompt, said), version)


def _drawn(text: str) -> np.random.Generator:
    return np.random.default_rng(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]))


async def replay(steps: list[dict[str, Any]], folder: Path) -> list[StepStatus]:
    """Train these steps, one after the other; each one's checkpoint stays."""
    config = recipe_here.configured(folder, {"learning_rate": 1e-2, "keep_checkpoints": len(steps) + 1})
    store, checkpoints = SampleStore(folder / "samples"), CheckpointStore(folder / "checkpoints")
    queue = StepQueue(
        folder,
        store,
        checkpoints,
        _published,
        trainer_failure=lambda: None,
        max_staleness=0,
        train=config.train,
    )
    running = asyncio.create_task(queue.run())
    try:
        with recipe_here.set_up(config) as recipe:
            ended = [await _step(queue, store, recipe, folder, at, step) for at, step in enumerate(steps)]
            recipe.cleanup()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    return ended


async def _step(
    queue: StepQueue, store: SampleStore, recipe: GRPOLoRARecipe, folder: Path, at: int, step: dict[str, Any]
) -> StepStatus:
    for rollout, predictor, call, cut_off in step["sampled"]:
        sample(store, at, rollout, predictor, call, cut_off)
    taken_in = await queue.submit(StepRequest.model_validate(step["body"]))
    await wait_until_async(step_folder(folder / "steps", taken_in.id).exists, _SECONDS)
    recipe.train()
    return await queue.wait(taken_in.id, _SECONDS)


async def _published(checkpoint: Checkpoint) -> dict[str, Any]:
    return {"version": checkpoint.version}


def main() -> None:
    traces, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    for name, steps in traces.items():
        for status in asyncio.run(replay(steps, folder / name)):
            print(json.dumps({"name": name, **status.model_dump()}))


if __name__ == "__main__":
    main()
