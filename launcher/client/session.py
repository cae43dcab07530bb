"""A program's session with its run: `connect()` gives it, and every part is a method of it.

Neighbours: `connection.py` carries the requests, `steps.py` has the training steps, `checkpoints.py` the kept
checkpoints, `program_state.py` the program's place; `tracing/` tags rollouts, `trajectories/` trains and logs
groups of them. Knows nothing of DSPy: any program in any SDK can roll out in a `rollout`, or against its
`rollout_url`, and reward here.

    session = connect()
    for example in examples:
        rollouts = []
        for _ in range(8):
            with session.rollout() as rollout:
                answer = agent(example)
            rollout.reward = judge(answer)
            rollouts.append(rollout)
        session.step([group(example.id, rollouts)])
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Unpack

from launcher.client import checkpoints, launch_line, run_lookup
from launcher.client.connection import Connection
from launcher.client.error_display import install_excepthook
from launcher.client.failures import NotConnected
from launcher.client.no_progress import MAX_EMPTY_STEPS, NoProgressGuard, check_max_empty_steps
from launcher.client.program_state import ProgramState
from launcher.client.request_bodies import SESSION_HEADER, TrainSettings, Validation
from launcher.client.schema import CheckpointInfo, RuntimeStatus
from launcher.client.steps import TrainingSteps
from launcher.client.tracing.rollout import Rollout, TracedRun, samples_of
from launcher.client.trajectories import log_groups, train_groups
from launcher.client.trajectories.results import Logged, StepResult
from launcher.client.wire import Endpoint, Patience


def connect(
    base_url: str | None = None,
    api_key: str | None = None,
    patience: Patience | None = None,
    *,
    max_empty_steps: int = MAX_EMPTY_STEPS,
) -> Session:
    """The run this program was started in, by `LAUNCH_BASE_URL` and `LAUNCH_API_KEY`.

    From elsewhere on this computer, a notebook above all, its name: `connect("dev")`; or its address and key.
    Asks for the run's status, so it raises NotConnected, EndpointLost or Refused now rather than later.
    `patience`: instead of the run's own (`Patience.of_run`). `max_empty_steps`: so many steps in a row with
    nothing to train end a training of any kind with TrainingFailed.
    """
    install_excepthook()
    if base_url and "://" not in base_url:
        found = run_lookup.find_run(base_url)
        session = Session(
            found.endpoint, patience or found.patience, found.run_dir, max_empty_steps=max_empty_steps
        )
        session.status()
        return session
    base_url = base_url or os.environ.get("LAUNCH_BASE_URL")
    api_key = api_key or os.environ.get("LAUNCH_API_KEY")
    if not base_url or not api_key:
        missing = "LAUNCH_BASE_URL" if not base_url else "LAUNCH_API_KEY"
        raise NotConnected(
            f"This program has no run to train with: {missing} is not set",
            hint=launch_line.launch_hint(),
        )
    endpoint = Endpoint(base_url.rstrip("/").removesuffix("/v1"), api_key)
    session = Session(endpoint, patience or Patience.of_run(), max_empty_steps=max_empty_steps)
    session.status()
    return session


@dataclass
class Session(TrainingSteps):
    """Made by `connect()`: the run's training steps, and all else of it. Safe to use from several threads."""

    endpoint: Endpoint
    patience: Patience = field(default_factory=Patience.of_run)
    # Of a run that was found by its name; else the program's environment has it.
    folder: Path | None = None
    # Steps in a row of which nothing can be trained: so many end a training.
    max_empty_steps: int = field(default=MAX_EMPTY_STEPS, kw_only=True)
    _state: ProgramState = field(init=False, repr=False)
    _guard: NoProgressGuard = field(init=False, repr=False)
    _traced_run: TracedRun = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__init__(Connection(self.endpoint, self.patience), lambda: self.run_dir)
        self._state = ProgramState(self)
        self._guard = NoProgressGuard(check_max_empty_steps(self.max_empty_steps))
        self._traced_run = TracedRun(self.connection)

    # ------------------------------------------------------------- address

    @property
    def api_key(self) -> str:
        return self.connection.api_key

    @property
    def base_url(self) -> str:
        """The OpenAI-compatible base URL."""
        return self.connection.base_url

    def rollout_url(self, rollout: str) -> str:
        """The base URL that tags everything sent through it with this rollout, for any SDK."""
        return self.connection.rollout_url(rollout)

    @property
    def session_url(self) -> str:
        """The base URL at which each request's header X-Session-ID names its rollout; verifiers sends it."""
        return self.connection.rollout_url(SESSION_HEADER)

    def new_rollout(self) -> str:
        """A new, unused rollout id."""
        return f"r-{uuid.uuid4().hex}"

    def rollout(
        self,
        rollout_id: str | None = None,
        *,
        predictor: str | None = None,
        purpose: Literal["train", "eval"] = "train",
        untrainable: Literal["count", "refuse"] = "count",
    ) -> Rollout:
        """`with run.rollout() as r:` tags the requests inside (OpenAI's SDK, httpx, LiteLLM, LangChain).

        `untrainable="refuse"`: a request whose answer could not be trained is an error at once.
        """
        return Rollout(self._traced_run, rollout_id or self.new_rollout(), predictor, purpose, untrainable)

    def samples_of(self, rollout: str) -> list[dict[str, Any]]:
        """The answers sampled in a rollout's name, in order, each as `sample` (its name), `version`,
        `predictor`, `purpose`, `received`, and `unscorable`: the reason why it cannot be trained, or None."""
        return samples_of(self.connection, rollout)

    @property
    def astray(self) -> int:
        """Requests of this process that were in no `rollout` while one was open: no reward reaches them."""
        return self._traced_run.untagged_requests

    @property
    def run_dir(self) -> Path | None:
        """The folder that comes home with the run, if `launch` gave one."""
        folder = self.folder or os.environ.get("LAUNCH_RUN_DIR")
        return Path(folder) if folder else None

    # ------------------------------------------------------------- its state

    def status(self) -> RuntimeStatus:
        """The whole state of the run now."""
        return self.connection.status()

    @property
    def model(self) -> str:
        """The policy's name on the endpoint; it always means the newest published version."""
        return self.connection.model

    @property
    def run_id(self) -> str:
        """The run's id; it distinguishes the run's versions from another run's."""
        return self.connection.run_id

    @property
    def version(self) -> int:
        """The policy version served now."""
        return self.connection.version

    @property
    def client_state(self) -> dict[str, Any] | None:
        """The state that the last committed step carried, or None."""
        return self.status().client_state

    def metrics(self, after: int = 0) -> list[dict[str, Any]]:
        """The trainer's metrics of the steps after `after`, oldest first."""
        return self.connection.get_json(f"/slipway/metrics?after={after}")

    def validated(self, validation: Validation) -> None:
        """Record a held-out score in the run: it comes home, and is in `launch report`."""
        log_groups.send_score(self.connection, validation)

    # ------------------------------------------------------------- training by trajectories

    def train(
        self,
        groups: Iterable[Any],
        *,
        state: Mapping[str, Any] | None = None,
        timeout_seconds: float | None = None,
        **settings: Unpack[TrainSettings],
    ) -> StepResult:
        """Train one step on groups of trajectories, and wait until its version answers.

        `state` is merged into the program's state and is kept with the step, all or nothing. The same groups
        with the same settings and state are the same step, however often they are sent, and an answer is
        trained once. It blocks: `train_async` lets other coroutines of the program go on. Raises the errors
        of `step`, and TrainingFailed when nothing could be trained `max_empty_steps` times in a row or the
        machine was lost three times in a row.
        """
        self._guard.max_empty_steps = check_max_empty_steps(self.max_empty_steps)  # it may be set anew
        return train_groups.train(self, self._state, self._guard, groups, state, timeout_seconds, settings)

    async def train_async(
        self, groups: Iterable[Any], *, state: Mapping[str, Any] | None = None, **settings: Any
    ) -> StepResult:
        """Like `train`, while other coroutines go on."""
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
        return log_groups.log(self.connection, self.run_dir, trajectories, split, metrics or {}, step)

    # ------------------------------------------------------------- the program's state

    def read_state(self) -> dict[str, Any]:
        """The program's state as of the last committed step, with everything merged since; `{}` at first.

        In a program that begins again, it waits for the step that its earlier life left behind.
        """
        return self._state.read()

    def merge_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Merge into the state, objects within it too. The next step that is trained keeps it."""
        return self._state.merge(state)

    def overwrite_state(self, state: Mapping[str, Any]) -> None:
        """Put another state in the place of the whole. The next step that is trained keeps it."""
        self._state.overwrite(state)

    @property
    def rewinds(self) -> int:
        """How often a step of this program was refused because the machine was lost."""
        return self._state.rewinds

    # ------------------------------------------------------------- checkpoints

    def checkpoints(self) -> list[CheckpointInfo]:
        """The committed checkpoints that are kept, oldest first."""
        return checkpoints.list_checkpoints(self.connection)

    def pin(self, name: str, best_of: str | None = None) -> CheckpointInfo:
        """Keep this checkpoint, or that of a version's name, until 32 others have been pinned since.

        Checkpoints that are unpinned then are logged by name. `best_of`: a name (letters, digits, `_.-`) of
        the work whose best it is; the one that was named so last comes home as `results/best`, and goes last.
        """
        return checkpoints.pin(self.connection, name, best_of)
