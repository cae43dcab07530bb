"""Training steps: one is sent once under its key, and waited for until its version is served.

Neighbours: `connection.py` carries them, `session.py` is these steps and all else of a run,
`trajectories/train_groups.py` makes some, `dropped_samples.py` and `step_alarms.py` are told of each that
ends. Knows nothing of how the groups in them were made.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from launcher.client.answers import check_client_state, parse_json
from launcher.client.connection import Connection
from launcher.client.dropped_samples import DroppedSampleWarnings
from launcher.client.failures import EndpointLost, StepFailed
from launcher.client.request_bodies import Group, RestoreRequest, StepRequest, StepSettings, SupervisedExample
from launcher.client.schema import RuntimeStatus, StepStatus
from launcher.client.step_alarms import StepAlarms

_LONG_POLL_SECONDS = 30
# A step's own time; the endpoint may be away meanwhile, once for all of its patience.
_STEP_SECONDS = 3600.0
_FINAL_STATES = ("published", "failed", "empty")


class TrainingSteps:
    """The training steps of one run."""

    def __init__(self, connection: Connection, run_dir: Callable[[], Path | None] = lambda: None) -> None:
        self.connection = connection
        self._dropped_samples = DroppedSampleWarnings()
        self.alarms = StepAlarms(run_dir)

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

        `settings`: this step's settings that differ from the run's. A step that teaches nothing (each group's
        rewards equal, or all answers cut off) has the `state` "empty" and no `version`; `error` says why.

        The step happens once, also over a broken connection: each try has the same `key`. The same key with
        another body is refused (409). Raises StepFailed with the runtime's reason, ValueError for a
        client_state over 64 KiB, EndpointLost, and Rewound when the machine and these rollouts were lost.
        """
        if client_state is not None:
            check_client_state(client_state)
        request = StepRequest(
            key=key or uuid.uuid4().hex,
            groups=[Group.model_validate(it, from_attributes=True) for it in groups],
            examples=list(examples),
            settings=settings,
            client_state=client_state,
        )
        status = self._send("/slipway/steps", request)
        if status.state == "empty":
            self._dropped_samples.report_step(status)
            self.alarms.report_step(status)
            return status
        return self.wait(status.id, timeout_seconds) if wait else status

    def restore(
        self,
        name: str,
        key: str | None = None,
        client_state: dict[str, Any] | None = None,
        wait: bool = True,
        timeout_seconds: float | None = None,
    ) -> StepStatus:
        """Serve a kept checkpoint again, as a new version. It is a step, with the errors of `step`.

        Without a `client_state` the program's place goes back to the checkpoint's too.
        """
        if client_state is not None:
            check_client_state(client_state)
        request = RestoreRequest(key=key or uuid.uuid4().hex, client_state=client_state)
        status = self._send(f"/slipway/checkpoints/{name}/restore", request)
        return self.wait(status.id, timeout_seconds) if wait else status

    def wait(self, step: int, timeout_seconds: float | None = None, committed: bool = False) -> StepStatus:
        """The step once it is published; without a time-out an hour is enough, and the endpoint's patience.

        `committed`: it is enough that it is trained and safe, and its version about to be served.
        Raises StepFailed when it failed or took too long, Rewound when it was lost with the machine.
        """
        timeout_seconds = self._timeout(timeout_seconds)
        deadline = time.monotonic() + timeout_seconds
        while True:
            until = "&until=committed" if committed else ""
            path = f"/slipway/steps/{step}?wait={_LONG_POLL_SECONDS}{until}"
            status = self.connection.get(path, StepStatus)
            if status.state == "failed":
                raise self._step_failed(status)
            if status.state in _FINAL_STATES or (committed and status.state == "committed"):
                self._dropped_samples.report_step(status)
                self.alarms.report_step(status)
                return status
            if time.monotonic() > deadline:
                raise StepFailed(
                    f"Step {step} was not published within {timeout_seconds:.0f} s (it is {status.state})",
                    step,
                )
            _check_alive(self.connection.status())

    def settle(self, timeout_seconds: float | None = None) -> RuntimeStatus:
        """The status once no step is in progress: a restarted program should resume from it."""
        timeout_seconds = self._timeout(timeout_seconds)
        deadline = time.monotonic() + timeout_seconds
        while (status := self.connection.status()).steps_queued:
            if time.monotonic() > deadline:
                raise StepFailed(
                    f"{status.steps_queued} steps are still queued after {timeout_seconds:.0f} s", None
                )
            _check_alive(status)
            time.sleep(0.2)
        return status

    def _send(self, path: str, request: StepRequest | RestoreRequest) -> StepStatus:
        answer = self.connection.request("POST", path, request.model_dump_json().encode())
        return StepStatus.model_validate(parse_json(answer))

    def _timeout(self, timeout_seconds: float | None) -> float:
        if timeout_seconds is None:
            return _STEP_SECONDS + self.connection.patience.away_seconds
        return timeout_seconds

    def _step_failed(self, status: StepStatus) -> StepFailed:
        hint = "the policy before it is still served; see the trainer's log"
        if status.version is not None:
            hint = (
                f"step-{status.version:06d} is kept and counts as trained; the version before it is served "
                f"until one after it is proven. `launch --resume {self.connection.run_id}` goes on after the "
                "newest step"
            )
        return StepFailed(f"Step {status.id} failed", status.id, why=status.error, hint=hint)


def _check_alive(status: RuntimeStatus) -> None:
    if status.phase == "failed":
        raise EndpointLost("The runtime has failed", why=status.detail, hint="`launch logs` shows its logs")
