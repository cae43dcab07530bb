"""`train_sft`: the answers of ART's trajectories are learned as they stand, a supervised step for each batch.

Neighbours: `backend.py` is asked by ART's model; `Session.step(examples=…)` takes the steps. The run itself
makes tokens of an answer, by the template it serves with (C53).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from functools import partial
from typing import Any

from launcher.client.art.art_training import step_metrics
from launcher.client.art.stderr_log import log_once
from launcher.client.no_progress import NoProgressGuard
from launcher.client.request_bodies import StepSettings, SupervisedExample
from launcher.client.schema import StepStatus
from launcher.client.session import Session
from launcher.client.train_once import train_once

# Where ART's `batch_size` is "auto": a batch is a step, and each step is a version that is served.
AUTO_BATCH = 8


async def sft_steps(
    session: Session, guard: NoProgressGuard, trajectories: Iterable[Any], config: Any
) -> AsyncIterator[dict[str, float]]:
    """Each step's metrics, once it is served. A batch without anything to learn is logged.

    Raises ValueError unless there is a learning rate for each batch, and TrainingFailed when several batches
    in a row have none.
    """
    examples = [example_of(trajectory) for trajectory in trajectories]
    batch_size = getattr(config, "batch_size", "auto")
    size = batch_size if isinstance(batch_size, int) and batch_size > 0 else AUTO_BATCH
    batches = [examples[start : start + size] for start in range(0, len(examples), size)]
    rates = _learning_rates(getattr(config, "learning_rate", None), len(batches))
    for batch, rate in zip(batches, rates, strict=True):
        status = await asyncio.to_thread(_step, session, guard, batch, StepSettings(learning_rate=rate))
        if status is not None:
            yield step_metrics(status, Counter()) | _art_counts(status, len(examples), len(batches))


def example_of(trajectory: Any) -> SupervisedExample:
    """A trajectory's own history as an example: every answer in it is learned."""
    return SupervisedExample(messages=trajectory.messages(), tools=trajectory.tools)


def _learning_rates(learning_rate: Any, batches: int) -> list[float | None]:
    """The rate of each batch; None is the run's own."""
    if not isinstance(learning_rate, list):
        return [learning_rate] * batches
    if len(learning_rate) < batches:
        raise ValueError(f"learning_rate has {len(learning_rate)} values, and there are {batches} batches")
    return learning_rate[:batches]


def _step(
    session: Session, guard: NoProgressGuard, batch: list[SupervisedExample], settings: StepSettings
) -> StepStatus | None:
    status = train_once(partial(session.step, examples=batch, settings=settings), guard)
    if isinstance(status, StepStatus):
        return status
    log_once(f"a batch of train_sft has no answer to learn: {status.why}")
    guard.empty(status.why, "every answer in a trajectory's messages is learned: has it any?")
    return None


def _art_counts(status: StepStatus, trajectories: int, batches: int) -> dict[str, float]:
    """ART's own counts."""
    return {
        "data/step_num_trajectories": float(trajectories),
        "data/step_trainer_tokens": float(status.counts.learned_tokens),
        "data/step_num_gradient_steps": float(batches),
    }
