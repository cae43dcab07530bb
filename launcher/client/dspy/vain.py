"""The no-progress guard: decides when a training that learns nothing gives up, with a hint.

Neighbour: `training.py` reports each step's runs to it. Knows nothing of programs or of the wire.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.client.dspy.report import Report, counts_text, plural
from launcher.client.dspy.rollouts import RUN_BY_HAND, FinishedRun, all_failed
from launcher.client.failures import TrainingFailed

# Steps that teach nothing, one after the other, before the training gives up.
STEPS_IN_A_ROW = 3

_BY_HAND = "run the program once by hand: does it call the policy, and does the metric"


@dataclass
class Vain:
    """Counts the steps in a row without progress, by the reason. Each method raises TrainingFailed."""

    report: Report
    # Whether a run has come to an end before, also in an earlier life of this training.
    has_run: bool = False
    _crashed: int = 0
    _unparsed: int = 0
    _empty: int = 0

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
        if self._crashed >= STEPS_IN_A_ROW:
            raise TrainingFailed(
                f"The program raised in every rollout of {self._crashed} steps in a row",
                why=finished[0].reason,
                hint=f"{RUN_BY_HAND} trainset",
            )

    def validated(self, outcomes: Mapping[str, int]) -> None:
        """A validation was made; it raises nothing here."""
        self.has_run |= any(count for name, count in outcomes.items() if name != "crashed")

    def trained(
        self, finished: Sequence[FinishedRun], parse_rate: float, cut_off_rate: float, count: int
    ) -> None:
        """A step was trained on so many samples: none, where no answer parses and all are worth the same."""
        self._empty = 0
        self._unparsed = self._unparsed + 1 if not parse_rate and not count else 0
        if self._unparsed >= STEPS_IN_A_ROW:
            raise TrainingFailed(
                f"No answer could be parsed in {self._unparsed} steps in a row",
                why=next((it.reason for it in finished if it.reason), None),
                hint=unparsed(cut_off_rate),
            )

    def empty(self, why: str, outcomes: str) -> None:
        """A step had nothing to train on."""
        self._empty += 1
        if self._empty >= STEPS_IN_A_ROW:
            raise TrainingFailed(
                f"{self._empty} steps in a row had nothing to train on",
                why=f"{why}; the last rollouts ended like this: {outcomes}",
                hint=_outside(self.report) or f"{_BY_HAND} score it?",
            )

    def ended(self, steps: int, trained: bool) -> None:
        """Silence is never success: a training in which no step changed anything has failed.

        `trained`: whether one did, in an earlier life of this training too.
        """
        if trained or not steps:
            return
        outcomes = {name for name, count in self.report.outcomes.items() if count}
        hint = unparsed(0.0) if outcomes == {"unparsed"} else _outside(self.report)
        raise TrainingFailed(
            f"Nothing was trained in {plural(steps, 'step')}",
            why=f"rollouts: {counts_text(self.report.outcomes)}; "
            f"samples left out: {counts_text(self.report.dropped)}",
            hint=hint or f"{_BY_HAND} tell answers apart?",
        )


def unparsed(cut_off_rate: float) -> str:
    """Advice if no answer parses. `cut_off_rate`: the share of runs cut off at their length limit."""
    cut_off = f" ({cut_off_rate:.0%} of the runs were cut off)" if cut_off_rate else ""
    return (
        "try another adapter (GRPO(adapter=dspy.JSONAdapter()), evaluate(adapter=…)), "
        f"more room for an answer (PolicyLM(max_tokens=…)){cut_off}, or fewer output fields"
    )


def _outside(report: Report) -> str | None:
    """For runs that other models failed; None if none did."""
    if not report.outside:
        return None
    named = ", ".join(f"{name} {plural(count, 'time')}" for name, count in report.outside.most_common())
    return f"other models failed, and those runs are left out: {named}; run fewer at once with num_threads=…"
