"""The held-out set of one training: scores it when due, and serves the best policy at the end.

Neighbours: `training.py` decides when, `validation.py` scores, `score_comparison.py` compares,
`training_place.py` keeps the results. Knows nothing of rollouts, groups or steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import dspy

from launcher.client.dspy.examples import TrainingData
from launcher.client.dspy.grpo_config import GRPOConfig
from launcher.client.dspy.report import Journal
from launcher.client.dspy.rollouts import FinishedRun
from launcher.client.dspy.score_comparison import Scores, is_comparable, rounded
from launcher.client.dspy.training_place import Place, Validated
from launcher.client.dspy.validation import Evaluation
from launcher.client.failures import Refused, TrainingFailed
from launcher.client.request_bodies import ScoredRollout, Validation
from launcher.client.schema import StepStatus
from launcher.client.session import Session

# The runtime's code for a checkpoint that is missing or incomplete.
_NOT_FOUND = "not_found"
# Of a validation, so many are named, for their texts. The run keeps its own number of them.
_MOST_ROLLOUTS = 256
_REASON_CHARACTERS = 400
# The figures sent with a validation besides its score, where they are known.
_REPORTED_FIGURES = ("standard_error", "parse_rate", "cut_off_rate")


@dataclass(frozen=True)
class ValidationResult:
    """One validation, before it is compared. `train_score`: of the trainset, if requested."""

    evaluation: Evaluation
    train_score: float | None
    seconds: float


@dataclass
class HeldOutSet:
    """`evaluate` runs the program greedily, with the newest version or the one of a name."""

    config: GRPOConfig
    data: TrainingData
    evaluate: Callable[[Sequence[dspy.Example], str | None], Evaluation]
    session: Session
    journal: Journal
    # The last validation; the best one is compared with it at the end.
    last: tuple[Validated, Scores] | None = field(default=None, init=False)

    def needs_score(self, place: Place, step: int) -> bool:
        """Whether the policy after `step` steps still has no score."""
        return bool(self.data.held_out) and place.validated(step) is None

    def score(self, model: str | None = None) -> ValidationResult:
        """Score the newest version, or the one of this name. Raises TrainingFailed if nothing has a score."""
        began = time.monotonic()
        evaluation = self._evaluate_or_raise(model)
        train_score = None
        if self.config.report_train_scores:
            train_score = self.evaluate(self.data.trainset, model).score
        return ValidationResult(evaluation, train_score, time.monotonic() - began)

    def record(self, place: Place, step: int, found: ValidationResult) -> None:
        """Record the result of the policy after `step` steps."""
        evaluation = found.evaluation
        figures = evaluation.to_dict()
        if found.train_score is not None:
            figures["train_score"] = found.train_score
        checkpoint = self._checkpoint_of(evaluation.version)
        validated = Validated(step, evaluation.score, evaluation.parse_rate, checkpoint)
        scores = rounded(evaluation.scores)
        best = place.add(validated, scores)
        self.last = validated, scores
        if best and checkpoint is not None and self.config.checkpoint != "none":
            self._pin(checkpoint, place.id)
        self._send_score(place.id, step, evaluation, figures)
        self.journal.validation(validated, figures, best, found.seconds)
        if reason := next((it.reason for it in evaluation.finished if it.outcome == "crashed"), None):
            self.journal.note_once("validation crashed", f"a run of the validation crashed: {reason}")
        if not is_comparable(scores):
            judged = sum(it is not None for it in scores)
            self.journal.note(
                f"only {judged} of {len(scores)} examples have a score, too few for a comparison"
            )

    def _send_score(
        self, compile_id: str, step: int, evaluation: Evaluation, figures: dict[str, Any]
    ) -> None:
        """The run keeps the score too; no training ends because it does not."""
        known = {name: value for name in _REPORTED_FIGURES if math.isfinite(value := figures[name])}
        validation = Validation(
            compile=compile_id,
            step=step,
            score=evaluation.score,
            examples=len(evaluation.finished),
            predictors=figures["predictors"],
            version=evaluation.version,
            rollouts=[_scored(it) for it in evaluation.finished[:_MOST_ROLLOUTS]],
            **known,
        )
        train_score = figures.get("train_score", math.nan)
        try:
            self.session.validated(validation)
            if math.isfinite(train_score):
                self.session.validated(
                    Validation(
                        compile=compile_id,
                        step=step,
                        name="train_score",
                        score=train_score,
                        version=validation.version,
                    )
                )
        except Refused as refused:
            self.journal.note_once(
                "not kept", f"the run does not keep validations: {refused.why or refused.message}"
            )

    def last_is_comparable(self) -> bool:
        """Whether the last validation has enough scores to be compared."""
        return self.last is not None and is_comparable(self.last[1])

    def restore_best(self, place: Place) -> StepStatus | None:
        """Serve the best validated policy again, unless the last one is as good: the step that did, if so."""
        best = place.best
        if self.config.checkpoint == "none" or best is None or self.last is None or self.last[0] == best:
            return None
        last, scores = self.last
        behind = place.gain(scores)
        if behind is not None and behind >= 0:
            return None
        words = f"validation was best after {best.step} steps ({best.score:.3f}, at the end {last.score:.3f})"
        if behind is None:
            words += ", but the end cannot be compared: too few examples have both scores"
        if best.checkpoint is None:
            self.journal.note(
                f"{words}: that is the model itself, still served as 'base'; no step improved on it"
            )
            return None
        place.restored = best.checkpoint
        try:
            served = self.session.restore(best.checkpoint, client_state=place.client_state(place.step))
        except Refused as refused:
            place.restored = None
            if refused.code != _NOT_FOUND:
                raise
            self.journal.note(f"{words}: {best.checkpoint} is not kept any more; the last one stays served")
            return None
        self.journal.note(f"{words}: {best.checkpoint} is served again")
        return served

    def _pin(self, checkpoint: str, compile_id: str) -> None:
        try:
            self.session.pin(checkpoint, best_of=compile_id)
        except Refused as refused:
            if refused.code != _NOT_FOUND:
                raise
            self.journal.note(f"{checkpoint}, the best so far, is not kept: {refused.why or refused.message}")

    def _evaluate_or_raise(self, model: str | None) -> Evaluation:
        evaluation = self.evaluate(self.data.held_out, model)
        if math.isnan(evaluation.score):
            raise TrainingFailed(
                f"The metric scored none of the {len(self.data.held_out)} validation examples",
                why=next((it.reason for it in evaluation.finished if it.reason), None),
                hint="run the program and the metric once by hand on an example of the valset",
            )
        return evaluation

    def _checkpoint_of(self, version: int | None) -> str | None:
        return next((it.name for it in self.session.checkpoints() if it.version == version), None)


def _scored(finished: FinishedRun) -> ScoredRollout:
    reason = (
        None if finished.score is not None else (finished.reason or finished.outcome)[:_REASON_CHARACTERS]
    )
    return ScoredRollout(
        rollout=finished.run.rollout.id,
        group=f"held out {finished.run.index}",
        reward=None if finished.score is None else finished.score.value,
        failure=reason,
    )
