"""What a session does with trajectories: trains groups of them, logs them, keeps the program's state.

Neighbours: `session.py` has these as methods of its own; the work is done in `trajectories/`, which is
imported when it is first asked for. Knows nothing of what a trajectory is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Self, TypedDict, Unpack

from launcher.client.bodies import Loss, Normaliser, Overlong, Schedule


class TrainSettings(TypedDict, total=False):
    """What a step does otherwise than the run, by the names of StepSettings."""

    learning_rate: float
    schedule: Schedule
    warmup_steps: int
    schedule_steps: int
    schedule_step: int
    weight_decay: float
    max_grad_norm: float
    loss: Loss
    normaliser: Normaliser
    scale_rewards: bool
    clip_low: float
    clip_high: float
    kl_beta: float
    overlong: Overlong
    overlong_tokens: int
    overlong_buffer: int


@dataclass(frozen=True)
class _Done:
    """A result that may be awaited too: `run.train(...)` and `await run.train(...)` are both right."""

    def __await__(self) -> Generator[Any, None, Self]:
        yield from ()
        return self


@dataclass(frozen=True)
class TrainResult(_Done):
    """What became of everything in the groups: `trained`, and the rest in `dropped` by its reason.

    The two together are the choices of all trajectories, the trajectories that have none, and the
    exceptions. `step` and `version` are None where nothing could be trained: then no step was taken.
    """

    step: int | None = None
    version: int | None = None
    trained: int = 0
    # Answers that continue the sequence of the one before, and how often a sequence had to begin anew.
    joined: int = 0
    sealed: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    groups: int = 0
    groups_without_variance: int = 0
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Logged(_Done):
    """What was logged: the line of `history.jsonl`, and the folder with it, where the run has one."""

    line: dict[str, Any] = field(default_factory=dict)
    folder: Path | None = None


class ByTrajectories:
    """The methods. Of a Session, and of nothing else."""

    # What `merge_state` said since the last step; it is kept with the next one.
    unsaved_state: dict[str, Any] | None = None
    # The newest committed step that this program knows of, and the state that is kept with it.
    known_place: tuple[int, dict[str, Any]] | None = None
    # How often a step of this program was refused because the machine was lost.
    rewinds: int = 0

    def train(
        self,
        groups: Iterable[Any],
        *,
        state: Mapping[str, Any] | None = None,
        timeout_seconds: float | None = None,
        **settings: Unpack[TrainSettings],
    ) -> TrainResult:
        """Train one step on groups of trajectories, and wait until its version answers.

        `state` is merged into the program's state and is kept with the step, all or nothing. The same groups
        with the same settings and state are the same step, however often they are sent, and an answer is
        trained once. It blocks: `train_async` lets other coroutines of the program go on.
        """
        work = import_module("launcher.client.trajectories.train_groups")
        return work.train(self, groups, state, timeout_seconds, settings)

    async def train_async(
        self, groups: Iterable[Any], *, state: Mapping[str, Any] | None = None, **settings: Any
    ) -> TrainResult:
        """As `train`, while other coroutines go on."""
        return await asyncio.to_thread(self.train, groups, state=state, **settings)

    def log(
        self,
        trajectories: Any = None,
        split: str = "val",
        *,
        metrics: Mapping[str, float] | None = None,
        step: int | None = None,
    ) -> Logged:
        """Keep trajectories and metrics in the run's folder; any split but "train" is its validation.

        `step`: that of the policy that was asked; else the newest whose answers are in them.
        """
        work = import_module("launcher.client.trajectories.log_groups")
        return work.log(self, trajectories, split, metrics or {}, step)

    def read_state(self) -> dict[str, Any]:
        """The program's state as of the last committed step, with what was merged since; `{}` at first.

        Asked by a program that begins again, it waits for the step that its earlier life left behind.
        """
        return import_module("launcher.client.trajectories.program_state").read(self)

    def merge_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Merge into the state, objects within it too. The next step that is trained keeps it."""
        return import_module("launcher.client.trajectories.program_state").merge(self, state)

    def overwrite_state(self, state: Mapping[str, Any]) -> None:
        """Put another state in the place of the whole. The next step that is trained keeps it."""
        import_module("launcher.client.trajectories.program_state").overwrite(self, state)
