"""Decides when a training gives up whose program crashes in every run, or whose answers never parse.

Neighbours: `rollout_collector.py` and `training.py` report each step to it;
`launcher/client/no_progress.py` has the guard that every loop has. Knows nothing of the wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import dspy

from launcher.base.embedded_models import asks_for_more
from launcher.client.dspy.report import Journal, Report, counts_text, plural
from launcher.client.dspy.rollouts import RUN_BY_HAND, FinishedRun, all_failed
from launcher.client.dspy.validation import Evaluation
from launcher.client.failures import TrainingFailed
from launcher.client.step_record import StepRecord, StepRollouts

# In a row, before the training gives up.
MAX_FAILED_STEPS = 3
# Fewer answers than this parse where a program asks for more than an embedded model knows.
_MIN_PARSE_RATE = 0.5

_BY_HAND = "run the program once by hand: does it call the policy, and does the metric"


@dataclass
class ProgramFailures:
    """Counts the steps in a row in which the program failed. Each method raises TrainingFailed."""

    journal: Journal
    adapter: dspy.Adapter
    # The run's model: a folder on its machine, or a hub name.
    model: str
    # Whether a run has come to an end before, also in an earlier life of this training.
    has_run: bool = False
    _crashed: int = 0
    _unparsed: int = 0

    def crashed(self, finished: Sequence[FinishedRun]) -> None:
        """A step was rolled out. A program that fails by itself and never ran through is not tried again."""
        if any(it.outcome != "crashed" for it in finished):
            self._crashed, self.has_run = 0, True
            return
        self._crashed += 1
        if all_failed(finished) and not self.has_run:
            raise TrainingFailed(
                f"The program raised in every one of the {len(finished)} rollouts of its first step",
                why=finished[0].reason,
                hint=f"{RUN_BY_HAND} trainset",
            )
        if self._crashed >= MAX_FAILED_STEPS:
            raise TrainingFailed(
                f"The program raised in every rollout of {self._crashed} steps in a row",
                why=finished[0].reason,
                hint=f"{RUN_BY_HAND} trainset",
            )

    def validated(self, found: Evaluation) -> None:
        """A validation was made; it raises nothing here."""
        self.has_run |= any(count for name, count in found.outcomes.items() if name != "crashed")
        scores = [it for it in found.scores if it is not None]
        is_lost = scores and (found.parse_rate < _MIN_PARSE_RATE or max(scores) <= found.failure_score)
        if is_lost and (advice := asks_for_more(self.model)):
            self.journal.note_once("model", advice)
        self.note_unparsed(found)

    def note_unparsed(self, found: StepRollouts | Evaluation) -> None:
        """Log it once if no answer parsed; it raises nothing here."""
        if not found.parse_rate and any(count for name, count in found.outcomes.items() if name != "crashed"):
            text = f"no run had answers that could be parsed; {unparsed(found.cut_off_rate, self.adapter)}"
            self.journal.note_once("unparsed", text)

    def trained(self, record: StepRecord, first_failure: str | None) -> None:
        """A step was trained: on nothing, where no answer parses and all are worth the same."""
        rollouts, count = record.rollouts, record.status.counts.trained
        self._unparsed = self._unparsed + 1 if not rollouts.parse_rate and not count else 0
        if self._unparsed >= MAX_FAILED_STEPS:
            raise TrainingFailed(
                f"No answer could be parsed in {self._unparsed} steps in a row",
                why=first_failure,
                hint=unparsed(rollouts.cut_off_rate, self.adapter),
            )

    def ended(self, steps: int, trained: bool) -> None:
        """Silence is never success: a training in which no step changed anything has failed.

        `trained`: whether one did, in an earlier life of this training too.
        """
        if trained or not steps:
            return
        report = self.journal.report
        outcomes = {name for name, count in report.outcomes.items() if count}
        hint = unparsed(0.0, self.adapter) if outcomes == {"unparsed"} else _outside(report)
        raise TrainingFailed(
            f"Nothing was trained in {plural(steps, 'step')}",
            why=f"rollouts: {counts_text(report.outcomes)}; samples left out: {counts_text(report.dropped)}",
            hint=hint or f"{_BY_HAND} tell answers apart?",
        )


def unparsed(cut_off_rate: float, adapter: dspy.Adapter) -> str:
    """Advice if no answer parses. `cut_off_rate`: the share of runs cut off at their length limit."""
    cut_off = f" ({cut_off_rate:.0%} of the runs were cut off)" if cut_off_rate else ""
    used = type(adapter).__name__
    other = "JSONAdapter" if used == "ChatAdapter" else "ChatAdapter"
    return (
        f"the model does not write the format of {used}; teach it first with examples "
        f"(dspy.BootstrapFinetune), use a plain signature of one output field, try adapter=dspy.{other}(), "
        f"or give an answer more room (max_tokens of its LM){cut_off}"
    )


def nothing_to_score(report: Report) -> str:
    """Advice if a step's rollouts have nothing to train."""
    return _outside(report) or f"{_BY_HAND} score it?"


def _outside(report: Report) -> str | None:
    """For runs that other models failed; None if none did."""
    if not report.outside:
        return None
    named = ", ".join(f"{name} {plural(count, 'time')}" for name, count in report.outside.most_common())
    return f"other models failed, and those runs are left out: {named}; run fewer at once with num_threads=…"
