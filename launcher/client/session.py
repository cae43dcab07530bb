"""A program's hold on its run: where it answers, its state, its training steps and checkpoints.

Neighbours: `wire.py` carries the requests, `grpo.py` trains through `Session.step`; `bodies.py` has
the bodies, `groups.py` makes groups. Knows nothing of DSPy: any program in any SDK can roll out in a
`rollout`, or against its `rollout_url`, and reward here.

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

import os
import sys
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel

from launcher.base.harmless import line as harmless
from launcher.client import attaching
from launcher.client.answers import check_size, json_of, refusal
from launcher.client.bodies import (
    REQUEST_HEADER,
    CheckpointInfo,
    Group,
    RestoreRequest,
    RuntimeStatus,
    StepRequest,
    StepSettings,
    StepStatus,
    SupervisedExample,
    Validation,
)
from launcher.client.by_trajectories import ByTrajectories
from launcher.client.failures import EndpointLost, NotConnected, StepFailed
from launcher.client.last_words import say_them
from launcher.client.left_out import LeftOut
from launcher.client.wire import Endpoint, Patience, Wire, new_request_id

if TYPE_CHECKING:
    from launcher.client.tracing import Rollout

_LONG_POLL_SECONDS = 30
# A step's own time; the endpoint may be away meanwhile, once for all of its patience.
_STEP_SECONDS = 3600.0
_SETTLED = ("published", "failed")

_Answer = TypeVar("_Answer", bound=BaseModel)


def connect(
    base_url: str | None = None, api_key: str | None = None, patience: Patience | None = None
) -> Session:
    """The run this program was started in; `LAUNCH_BASE_URL` and `LAUNCH_API_KEY` say which.

    From elsewhere on this computer, a notebook above all, its name: `connect("dev")`; or its address and key.
    Asks for the run's status, so it raises NotConnected, EndpointLost or Refused now rather than later.
    `patience`: instead of the run's own (`Patience.of_run`).
    """
    say_them()
    if base_url and "://" not in base_url:
        found = attaching.by_name(base_url)
        session = Session(found.endpoint, patience or found.patience, found.run_dir)
        session.status()
        return session
    base_url = base_url or os.environ.get("LAUNCH_BASE_URL")
    api_key = api_key or os.environ.get("LAUNCH_API_KEY")
    if not base_url or not api_key:
        missing = "LAUNCH_BASE_URL" if not base_url else "LAUNCH_API_KEY"
        raise NotConnected(
            f"This program has no run to train with: {missing} is not set",
            hint="start it with `launch -- python YOUR_PROGRAM.py`",
        )
    endpoint = Endpoint(base_url.rstrip("/").removesuffix("/v1"), api_key)
    session = Session(endpoint, patience or Patience.of_run())
    session.status()
    return session


@dataclass
class Session(ByTrajectories):
    """Made by `connect()`. Safe to use from several threads."""

    endpoint: Endpoint
    patience: Patience = field(default_factory=Patience.of_run)
    # Of a run that was found by its name; else the program's environment has it.
    folder: Path | None = None
    # Requests of this process from outside every `rollout` while one was open: no reward reaches them.
    astray: int = field(default=0, init=False)
    wire: Wire = field(init=False, repr=False)
    _served_name: str | None = field(default=None, init=False, repr=False)
    _run_id: str | None = field(default=None, init=False, repr=False)
    _left_out: LeftOut = field(default_factory=LeftOut, init=False, repr=False)

    def __post_init__(self) -> None:
        self.wire = Wire(self.endpoint, self.patience)

    # ------------------------------------------------------------- where it answers

    @property
    def api_key(self) -> str:
        return self.endpoint.api_key

    @property
    def base_url(self) -> str:
        """The OpenAI-compatible base URL."""
        return f"{self.endpoint.root}/v1"

    def rollout_url(self, rollout: str) -> str:
        """The base URL that tags everything sent through it with this rollout, for any SDK."""
        return f"{self.endpoint.root}/rollouts/{quote(rollout, safe='')}/v1"

    def new_rollout(self) -> str:
        """A rollout id nobody has used."""
        return f"r-{uuid.uuid4().hex}"

    def rollout(
        self,
        rollout_id: str | None = None,
        *,
        predictor: str | None = None,
        purpose: Literal["train", "eval"] = "train",
        untrainable: Literal["count", "refuse"] = "count",
    ) -> Rollout:
        """`with run.rollout() as r:` tags what is asked inside (OpenAI's SDK, httpx, LiteLLM, LangChain).

        `untrainable="refuse"`: a request whose answer could not be trained is an error at once.
        """
        from launcher.client.tracing import Rollout

        return Rollout(self, rollout_id or self.new_rollout(), predictor, purpose, untrainable)

    def samples_of(self, rollout: str) -> list[dict[str, Any]]:
        """What was sampled in a rollout's name, in order; `unscorable` says why one cannot be trained."""
        return json_of(self._ask("GET", f"/slipway/rollouts/{quote(rollout, safe='')}/samples"))

    @property
    def run_dir(self) -> Path | None:
        """The folder that comes home with the run, if `launch` gave one."""
        folder = self.folder or os.environ.get("LAUNCH_RUN_DIR")
        return Path(folder) if folder else None

    # ------------------------------------------------------------- its state

    def status(self) -> RuntimeStatus:
        """The whole state of the run now."""
        status = self._get("/slipway/status", RuntimeStatus)
        self._served_name, self._run_id = status.served_name, status.run_id
        return status

    @property
    def model(self) -> str:
        """The policy's name on the endpoint; it always means the newest published version."""
        return self._served_name or self.status().served_name

    @property
    def run_id(self) -> str:
        """The run's id, by which its versions are told from another run's."""
        return self._run_id or self.status().run_id

    @property
    def version(self) -> int:
        """The policy version served now."""
        return self.status().version

    @property
    def client_state(self) -> dict[str, Any] | None:
        """What the last committed step carried, or None."""
        return self.status().client_state

    def metrics(self, after: int = 0) -> list[dict[str, Any]]:
        """The trainer's metrics of the steps after `after`, oldest first."""
        return json_of(self._ask("GET", f"/slipway/metrics?after={after}"))

    def validated(self, validation: Validation) -> None:
        """Keep a held-out score beside what is trained: it comes home, and is in `launch report`."""
        self._ask("POST", "/slipway/validations", validation.model_dump_json().encode())

    # ------------------------------------------------------------- training

    def step(
        self,
        groups: Iterable[Group] = (),
        key: str | None = None,
        client_state: dict[str, Any] | None = None,
        wait: bool = True,
        timeout_seconds: float | None = None,
        *,
        examples: Iterable[SupervisedExample] = (),
        settings: StepSettings | None = None,
    ) -> StepStatus:
        """Train one step on these groups, or on these examples; with `wait`, until its version is published.

        `settings`: what this step does otherwise than the run.

        The step happens once, whatever the connection does: each try has the same `key`. The same key with
        another body is refused (409). Raises StepFailed with the runtime's reason, ValueError for a
        client_state over 64 KiB, EndpointLost, and Rewound when the machine and these rollouts were lost.
        """
        if client_state is not None:
            check_size(client_state)
        sent = [Group.model_validate(it, from_attributes=True) for it in groups]
        request = StepRequest(
            key=key or uuid.uuid4().hex,
            groups=sent,
            examples=list(examples),
            settings=settings,
            client_state=client_state,
        )
        status = self._post("/slipway/steps", request, StepStatus)
        return self.wait(status.id, timeout_seconds) if wait else status

    def wait(self, step: int, timeout_seconds: float | None = None, committed: bool = False) -> StepStatus:
        """The step once it is published; without a time-out an hour is enough, and the endpoint's patience.

        `committed`: it is enough that it is trained and safe, and its version about to be served.
        Raises StepFailed when it failed or took too long, Rewound when it was lost with the machine.
        """
        timeout_seconds = self._bound(timeout_seconds)
        deadline = time.monotonic() + timeout_seconds
        while True:
            until = "&until=committed" if committed else ""
            status = self._get(f"/slipway/steps/{step}?wait={_LONG_POLL_SECONDS}{until}", StepStatus)
            if status.state == "failed":
                raise self._failed(status)
            if status.state in _SETTLED or (committed and status.state == "committed"):
                self._left_out.tell(status.id, status.counts)
                return status
            if time.monotonic() > deadline:
                raise StepFailed(
                    f"Step {step} was not published within {timeout_seconds:.0f} s (it is {status.state})",
                    step,
                )
            self._check_alive()

    def _failed(self, status: StepStatus) -> StepFailed:
        hint = "the policy before it is still served; see the trainer's log"
        if status.version is not None:
            hint = (
                f"step-{status.version:06d} is kept and counts as trained; the version before it is served "
                f"until one after it is proven. `launch --resume {self.run_id}` goes on after the newest step"
            )
        return StepFailed(f"Step {status.id} failed", status.id, why=status.error, hint=hint)

    def settle(self, timeout_seconds: float | None = None) -> RuntimeStatus:
        """The status once no step is under way: what a restarted program should resume from."""
        timeout_seconds = self._bound(timeout_seconds)
        deadline = time.monotonic() + timeout_seconds
        while (status := self.status()).steps_queued:
            if time.monotonic() > deadline:
                raise StepFailed(
                    f"{status.steps_queued} steps are still queued after {timeout_seconds:.0f} s", None
                )
            self._check_alive(status)
            time.sleep(0.2)
        return status

    def _bound(self, timeout_seconds: float | None) -> float:
        return _STEP_SECONDS + self.patience.away_seconds if timeout_seconds is None else timeout_seconds

    def _check_alive(self, status: RuntimeStatus | None = None) -> None:
        status = status or self.status()
        if status.phase == "failed":
            raise EndpointLost(
                "The runtime has failed", why=status.detail, hint="`launch logs` shows its logs"
            )

    # ------------------------------------------------------------- checkpoints

    def checkpoints(self) -> list[CheckpointInfo]:
        """The committed checkpoints that are kept, oldest first."""
        found = [
            CheckpointInfo.model_validate(it) for it in json_of(self._ask("GET", "/slipway/checkpoints"))
        ]
        return sorted(found, key=lambda it: it.step)

    def pin(self, name: str, best_of: str | None = None) -> CheckpointInfo:
        """Keep this checkpoint, or that of a version's name, until 32 others have been pinned since.

        What goes then is said by name. `best_of`: a name (letters, digits, `_.-`) of the work whose best it
        is; the one that was named so last comes home as `results/best`, and goes last.
        """
        named = f"?best_of={quote(best_of, safe='')}" if best_of is not None else ""
        answer = self._ask("POST", f"/slipway/checkpoints/{name}/pin{named}")
        pinned = CheckpointInfo.model_validate(json_of(answer))
        if pinned.let_go:
            self._say_let_go(pinned.let_go)
        return pinned

    def _say_let_go(self, checkpoints: Iterable[str]) -> None:
        model = harmless(self.model)
        names = ", ".join(f"{model}@v{int(it.removeprefix('step-'))}" for it in checkpoints)
        sys.stderr.write(
            f"slipway: no longer pinned, because others were pinned since: {names}. Pin again what a program "
            "still names, while it answers\n"
        )
        sys.stderr.flush()

    def restore(
        self,
        name: str,
        key: str | None = None,
        client_state: dict[str, Any] | None = None,
        wait: bool = True,
        timeout_seconds: float | None = None,
    ) -> StepStatus:
        """Serve a kept checkpoint again, as a new version. It is a step: see `step` for what it raises.

        Without a `client_state` the program's place goes back to the checkpoint's too.
        """
        if client_state is not None:
            check_size(client_state)
        request = RestoreRequest(key=key or uuid.uuid4().hex, client_state=client_state)
        status = self._post(f"/slipway/checkpoints/{name}/restore", request, StepStatus)
        return self.wait(status.id, timeout_seconds) if wait else status

    # ------------------------------------------------------------- requests

    def _get(self, path: str, answer: type[_Answer]) -> _Answer:
        return answer.model_validate(json_of(self._ask("GET", path)))

    def _post(self, path: str, body: BaseModel, answer: type[_Answer]) -> _Answer:
        return answer.model_validate(json_of(self._ask("POST", path, body.model_dump_json().encode())))

    def _ask(self, method: str, path: str, content: bytes | None = None) -> httpx.Response:
        headers = {REQUEST_HEADER: new_request_id()}
        if content is not None:
            headers["content-type"] = "application/json"
        response = self.wire.send(method, path, content, headers)
        if response.is_error:
            raise refusal(method, path, response)
        return response
