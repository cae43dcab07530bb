"""The errors between a program and its run; each has a reason and a hint.

Neighbours: `wire.py`, `connection.py` and `steps.py` raise these, `grpo.py` adds the optimizer's own.

    LaunchError
    └── ClientError
        ├── NotConnected     the program was not started by `launch`
        ├── EndpointLost     no answer within the patience, or the runtime has failed
        ├── Refused          the runtime answered with an error
        │   └── Rewound      the machine was lost: roll out again from `client_state`
        ├── StepFailed       a training step failed
        └── TrainingFailed   a training cannot go on: no sample, no score, lost machines
"""

# ruff: noqa: N818 - these names are events
from __future__ import annotations

from typing import Any

from launcher.base.errors import LaunchError


class ClientError(LaunchError):
    """Base of the client's errors. Its text is all three lines: programs print it, not our CLI."""

    def __str__(self) -> str:
        parts = [self.message]
        if self.why:
            parts.append(self.why)
        if self.hint:
            parts.append(f"Hint: {self.hint}")
        return "\n".join(parts)


class NotConnected(ClientError):
    """There is no run to talk to."""

    exit_code = 3


class EndpointLost(ClientError):
    """No answer from the runtime within the patience."""

    exit_code = 6


class Refused(ClientError):
    """The runtime's answer was an error: `status` is HTTP's, `error` the object that came with it."""

    exit_code = 6

    def __init__(
        self,
        message: str,
        status: int,
        error: dict[str, Any] | None = None,
        why: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, why, hint)
        self.status = status
        self.error = error or {}

    @property
    def code(self) -> str | None:
        """The runtime's code of the error: "nothing_to_train", "queue_full", …"""
        return self.error.get("code")


class Rewound(Refused):
    """The rollouts a step named are gone with the machine: roll out again from `client_state`."""

    @property
    def client_state(self) -> dict[str, Any] | None:
        """The client_state of the last durable step."""
        return self.error.get("client_state")


class StepFailed(ClientError):
    """A step ended without a published version; the old one is still served."""

    exit_code = 6

    def __init__(
        self, message: str, step: int | None, why: str | None = None, hint: str | None = None
    ) -> None:
        super().__init__(message, why, hint)
        self.step = step


class TrainingFailed(ClientError):
    """A training stopped by itself rather than train on nothing, or on machines that keep being lost."""

    exit_code = 6
