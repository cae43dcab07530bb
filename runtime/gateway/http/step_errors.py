"""The errors of a step, or of a request about one.

    StepError
    ├── KeyReusedError            the key belongs to a step with another body
    ├── QueueFullError            as many steps wait as may wait
    ├── SettingsRefusedError its settings make no valid update; `key` is the first such key
    ├── ClientStateTooLargeError  the program's own state is more than is kept with a step
    ├── NothingToTrainError not one sample of the step can be trained; `counts` has the reasons
    ├── RewoundError it names a lost machine's samples; the program goes back to `client_state`
    ├── UnknownStepError          no such step
    └── UnknownCheckpointError    no such checkpoint
    NotPublishedError raised by `publish` when the old version stays; the message is the reason

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
    """The queue holds the maximum number of waiting steps."""


class SettingsRefusedError(StepError):
    """The step's own settings contradict each other or the run's; `key` is the first such key."""

    def __init__(self, message: str, key: str) -> None:
        super().__init__(message)
        self.key = key


class ClientStateTooLargeError(StepError):
    """The program's own state is more than is kept with a step."""


class NothingToTrainError(StepError):
    """None of the step's samples can be trained; `counts` has the reasons."""

    def __init__(self, counts: StepCounts) -> None:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(counts.dropped.items()))
        super().__init__(f"no sample of this step can be trained: {reasons or 'no group has a member'}")
        self.counts = counts


class RewoundError(StepError):
    """The rollouts or steps were lost with a machine: the run is back at `step`, and the program should go
    back too.

    `lost_at`: when, in Unix seconds; it tells one loss from another.
    """

    def __init__(
        self, message: str, step: int, client_state: dict[str, Any] | None, lost_at: float | None
    ) -> None:
        super().__init__(message)
        self.step = step
        self.client_state = client_state
        self.lost_at = lost_at


class UnknownStepError(StepError):
    """No such step."""


class UnknownCheckpointError(StepError):
    """No such checkpoint."""


class NotPublishedError(Exception):
    """Raised by `publish` when the old version stays; the message is the reason."""
