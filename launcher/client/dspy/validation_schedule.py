"""The schedule of a training's validations: with staleness the next steps go on meanwhile.

A validation beside training scores one version by its name, and may be as many steps behind as the rollouts
are ahead: the run keeps that version for so long. Neighbours: `training.py` asks after each step;
`held_out.py` scores and compares; `training_place.py` keeps the validation in progress, so that a restart
repeats it. Knows nothing of rollouts or groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from launcher.client.dspy.grpo_config import GRPOConfig
from launcher.client.dspy.held_out import HeldOutSet, ValidationResult
from launcher.client.dspy.served_version import ServedVersion
from launcher.client.dspy.training_place import PendingValidation, Place
from launcher.client.dspy.validation import Evaluation
from launcher.client.dspy.version_names import version_name
from launcher.client.dspy.workers import BackgroundCall
from launcher.client.failures import ClientError

RunInBackground = Callable[[Callable[[], ValidationResult]], BackgroundCall[ValidationResult]]
"""Has a function called beside the rollouts."""


@dataclass
class ValidationSchedule:
    """A training's validations, every `num_steps_for_val` steps. `on_result` gets each, and its step."""

    config: GRPOConfig
    held_out: HeldOutSet
    served: ServedVersion
    run_in_background: RunInBackground
    on_result: Callable[[Evaluation, int], None]
    _under_way: BackgroundCall[ValidationResult] | None = field(default=None, init=False)

    def is_due(self, step: int) -> bool:
        """Whether one is due after so many steps."""
        return step in (0, self.config.num_train_steps) or step % self.config.num_steps_for_val == 0

    def run_if_due(self, place: Place) -> None:
        """Validate if it is due after the steps that are done."""
        step = place.step
        if not self.is_due(step):
            return
        self.wait(place)
        served, config = self.served, self.config
        if not self.held_out.needs_score(place, step):
            return
        if config.staleness and 0 < step < config.num_train_steps and served.version is not None:
            self._begin(place, PendingValidation(step, served.version, served.weights))
        else:
            self.run_now(place)

    def run_now(self, place: Place) -> None:
        """Validate the served version, whether it is due or not."""
        if self.held_out.needs_score(place, place.step):
            self._record(place, place.step, self.held_out.score())

    def restart(self, place: Place) -> None:
        """The one that was in progress at this place, if any."""
        left = place.validating
        if left is None:
            return
        kept = {it.version: it.weights for it in self.held_out.session.checkpoints()}
        if left.version not in kept or (left.weights and kept[left.version] != left.weights):
            self.held_out.journal.note(
                f"no validation after {left.step} steps: its weights are not kept any more"
            )
            place.validating = None
            return
        self._begin(place, left)
        if not self.config.staleness:
            self.wait(place)

    def collect(self, place: Place) -> None:
        """Before a step is sent: note the one in progress if it is over, wait if it would fall behind."""
        if self._under_way is None or place.validating is None:
            return
        if self._under_way.is_over or place.step - place.validating.step >= self.config.staleness:
            self.wait(place)

    def wait(self, place: Place) -> None:
        """Note the validation in progress, once it is over. Raises its errors, and Rewound.

        A lost machine has taken the version along: an unknown name is then no failure.
        """
        under_way, left = self._under_way, place.validating
        if under_way is None or left is None:
            return
        try:
            found = under_way.result()
        except ClientError:
            self.served.check_still_served()
            raise
        self.served.check_still_served()
        self._under_way = None
        place.validating = None
        self._record(place, left.step, found)

    def end(self) -> None:
        """No run of one is in progress any more, once its workers were stopped."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.join()

    def _begin(self, place: Place, what: PendingValidation) -> None:
        place.validating = what
        model = version_name(self.held_out.session, what.version, what.weights)
        self._under_way = self.run_in_background(partial(self.held_out.score, model))

    def _record(self, place: Place, step: int, found: ValidationResult) -> None:
        self.held_out.record(place, step, found)
        self.on_result(found.evaluation, step)
