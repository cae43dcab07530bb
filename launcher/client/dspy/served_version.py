"""The version that a training is served; an older one all of a sudden means that the machine was lost.

Neighbours: `training.py` reports the trained versions and those of answers; `version_names.py` has the names.
A loss shows in unknown rollouts only if it fell among them; later requests are answered, by older weights.
Knows nothing of groups or scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.client.dspy import version_names
from launcher.client.dspy.predictors import Predictors
from launcher.client.dspy.report import Journal
from launcher.client.dspy.rollouts import FinishedRun
from launcher.client.failures import Refused, Rewound
from launcher.client.schema import StepStatus
from launcher.client.session import Session


@dataclass
class ServedVersion:
    """`version`: the version that is served after the last awaited step, and the hash of its weights.

    `committed`: the version that the last step made; it will be served soon, or is `version`.
    """

    session: Session
    journal: Journal
    version: int | None = None
    weights: str | None = None
    committed: int | None = None
    # The newest version that a step or an answer has named.
    _seen: int = 0

    def note_published(self, status: StepStatus) -> None:
        """A step was published."""
        self.version = self.committed = status.version
        self.weights = (status.publication or {}).get("sha256")
        self._seen = max(self._seen, status.version or 0)

    def note_committed(self, status: StepStatus) -> None:
        """A step was trained."""
        self.committed = status.version

    @property
    def is_newest(self) -> bool:
        """Whether the version of the last step is served."""
        return self.version == self.committed

    def check_runs(self, finished: Sequence[FinishedRun], predictors: Predictors) -> None:
        """Raise Rewound if an older version answers than was served before."""
        trained = predictors.trained
        versions = {version for it in finished for version in it.run.rollout.versions_of(trained)}
        if versions and min(versions) < self._seen:
            self._raise_if_rewound(self._seen)
        self._seen = max(self._seen, *versions, 0)

    def check_still_served(self) -> None:
        """Raise Rewound if the version of before is not served any more."""
        if self._seen:
            self._raise_if_rewound(self._seen)

    def pin(self) -> tuple[int, str]:
        """Pin the version that is served at the end (see `Session.pin`). Returns its number and its name
        (C55).

        Raises Rewound if it was lost meanwhile.
        """
        version, weights = self.version, self.weights
        if version is None:  # nothing was trained here: a number alone may have been given out before
            version = self.session.version
            weights = version_names.weights_hash(self.session, version)
        try:
            return version, version_names.pin_version(self.session, version, weights)
        except Refused as refused:
            self._raise_if_rewound(version)
            name = f"{self.session.model}@v{version}"
            self.journal.note(f"{name} is not kept and no longer answers: {refused.why or refused.message}")
            return version, name

    def reset(self) -> None:
        """The run went back: forget the served version."""
        self.version = self.weights = self.committed = None
        self._seen = 0

    def _raise_if_rewound(self, known: int) -> None:
        now = self.session.version
        if now < known:
            why = f"version {now} is served, and version {known} was before"
            raise Rewound("The machine was lost, and the run went back", 409, why=why)
