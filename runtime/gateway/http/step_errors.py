"""The errors of a step, or of a request about one.

    StepError
    ├── KeyReusedError            the key belongs to a step with another body
    ├── QueueFullError            as many steps wait as may wait
    ├── SettingsRefusedError      what it says of its own update makes none; `key` is the first such key
    ├── ClientStateTooLargeError  the program's own state is more than is kept with a step
    ├── NothingToTrainError       not one sample of the step can be trained; `counts` says why
    ├── RewoundError              it names what a lost machine knew; the program goes back to `client_state`
    ├── UnknownStepError          no such step
    └── UnknownCheckpointError    no such checkpoint
    NotPublishedError             what `publish` raises when the old version stays; the message is the reason

Neighbours: queue.py and handover.py raise them, routes.py words them as HTTP. Knows nothing of either.
"""

from __future__ import annotations

from typing import Any

from runtime.shared.statuses import StepCounts


class StepError(Exception):
    """A step, or a question about one, that cannot be accepted."""


class KeyReusedError(StepError):
    """The key belongs to a step with another body."""


class QueueFullError(StepError):
    """As many steps wait as may wait."""


class SettingsRefusedError(StepError):
    """What the step says of its own update makes none; `key` is the first such key."""

    def __init__(self, message: str, key: str) -> None:
        super().__init__(message)
        self.key = key


class ClientStateTooLargeError(StepError):
    """The program's own state is more than is kept with a step."""


class NothingToTrainError(StepError):
    """Not one sample of the step can be trained; `counts` says why."""

    def __init__(self, counts: StepCounts) -> None:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(counts.dropped.items()))
        super().__init__(f"no sample of this step can be trained: {reasons or 'no group has a member'}")
        self.counts = counts


class RewoundError(StepError):
    """What is asked about was lost with a machine: the run is back at `step`; so should the program be."""

    def __init__(self, message: str, step: int, client_state: dict[str, Any] | None) -> None:
        super().__init__(message)
        self.step = step
        self.client_state = client_state


class UnknownStepError(StepError):
    """No such step."""


class UnknownCheckpointError(StepError):
    """No such checkpoint."""


class NotPublishedError(Exception):
    """What `publish` raises when the old version stays; the message is the reason."""
