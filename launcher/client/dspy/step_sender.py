"""Sends a step's groups, and waits until they are trained and their version is served.

At staleness 0 a step is sent once the version of the step before it is served. With staleness it is sent as
soon as that step is committed: the trainer works on it while that version is verified and published. Rollouts
on a version begin once it is served. Neighbours: `training.py` sends each step, `rollout_collector.py` has
the runs in progress meanwhile, `served_version.py` the versions. Knows nothing of a step's result.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from launcher.client.dspy.rollout_collector import RolloutCollector, StepBatch
from launcher.client.dspy.served_version import ServedVersion
from launcher.client.dspy.workers import BackgroundCall
from launcher.client.schema import StepStatus
from launcher.client.session import Session
from launcher.client.train_kwargs import ResolvedTrainKwargs


@dataclass
class StepSender:
    """`ahead`: whether a step may be sent before the version of the one before it is served.

    `resolved`: the settings of each step that differ from the run's.
    """

    session: Session
    collector: RolloutCollector
    served: ServedVersion
    resolved: ResolvedTrainKwargs
    ahead: bool
    # The step that is committed, and waits for its version to be served.
    _publishing: BackgroundCall[StepStatus] | None = field(default=None, init=False)

    def reset(self) -> None:
        """The machine was lost, and the step in progress with it."""
        self._publishing = None

    def send(self, batch: StepBatch, client_state: dict[str, Any]) -> StepStatus:
        """Queue the step, with every group that was rolled out. Raises as `Session.step` does."""
        settings = self.resolved.settings_at(batch.step)
        return self.session.step(batch.groups, client_state=client_state, wait=False, settings=settings)

    def wait_until_trained(self, batch: StepBatch, sent: StepStatus) -> StepStatus:
        """The step's status once it is trained, while later ones are rolled out.

        Its version is served then, or with `ahead` committed. An empty step has none: the version before it
        is served on.
        """
        status = sent if sent.state == "empty" else self._trained(sent)
        if status.state == "empty":
            return status
        if self.ahead:
            self.served.note_committed(status)
            published = partial(self.session.wait, sent.id)
            self._publishing = self.collector.begin_allowed_after(batch.step + 1, published)
        else:
            self.served.note_published(status)
        return status

    def _trained(self, sent: StepStatus) -> StepStatus:
        wait = partial(self.session.wait, sent.id, committed=self.ahead)
        return self.collector.in_background(wait).result()

    @property
    def is_publishing(self) -> bool:
        """Whether the last step's version is not known to be served yet."""
        return self._publishing is not None

    def wait_until_served(self) -> None:
        """Wait until the last step's version is served. Raises the errors of its publication."""
        publishing, self._publishing = self._publishing, None
        if publishing is not None:
            self.served.note_published(publishing.result())
