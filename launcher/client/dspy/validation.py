"""Greedy evaluation of a program on held-out examples, by the same code as training rolls out.

Neighbours: `rollouts.py` runs, `grpo.py` validates with it, examples print it before and after. Every request
has the purpose "eval", which the gateway records apart and refuses to train on (C48). Knows nothing of steps
or checkpoints.
"""

from __future__ import annotations

import math
import statistics
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import dspy

from launcher.base.sanitize import one_line as sanitized
from launcher.client import standard_error
from launcher.client.dspy.engine import BASE_MODEL
from launcher.client.dspy.examples import check_examples
from launcher.client.dspy.program_rollout import ProgramRollout
from launcher.client.dspy.programs import attach_policy, strict_adapter
from launcher.client.dspy.rollouts import (
    RUN_BY_HAND,
    FinishedRun,
    ProgramRun,
    RolloutLimits,
    Runner,
    all_failed,
    run_all,
)
from launcher.client.dspy.scoring import Metric
from launcher.client.dspy.workers import Workers
from launcher.client.failures import EndpointLost, TrainingFailed
from launcher.client.session import Session, connect

GREEDY = {"temperature": 0.0}
# A held-out set is small and a metric may fail on part of it: this many failures in a row are no accident.
_MAX_METRIC_FAILURES = 32
_SCORED_OUTCOMES = frozenset({"scored", "unparsed", "crashed"})
# One run that raised tells little about a program.
_MIN_FATAL_RUNS = 2


@dataclass(frozen=True)
class Evaluation:
    """A program's greedy score. A run that failed counts `failure_score`; an unscored one is left out."""

    score: float
    standard_error: float
    parse_rate: float
    cut_off_rate: float
    version: int | None
    predictors: dict[str, float]
    outcomes: dict[str, int]
    finished: tuple[FinishedRun, ...]
    failure_score: float = 0.0

    @property
    def scores(self) -> list[float | None]:
        """The score of each example, in their order; None if it has none."""
        return [
            _score(it, self.failure_score) if it.outcome in _SCORED_OUTCOMES else None for it in self.finished
        ]

    def difference(self, other: Evaluation) -> float:
        """How far this one is above another, on the examples that both have scored; NaN without any."""
        differences = self._differences(other)
        return statistics.fmean(differences) if differences else math.nan

    def difference_error(self, other: Evaluation) -> float:
        """The standard error of `difference`, pair by pair."""
        return standard_error.of_mean(self._differences(other))

    def _differences(self, other: Evaluation) -> list[float]:
        pairs = zip(self.scores, other.scores, strict=True)
        return [here - there for here, there in pairs if here is not None and there is not None]

    def to_dict(self) -> dict[str, Any]:
        """The figures, as JSON has them."""
        return {
            "score": self.score,
            "standard_error": self.standard_error,
            "parse_rate": self.parse_rate,
            "cut_off_rate": self.cut_off_rate,
            "version": self.version,
            "predictors": self.predictors,
            "examples": len(self.finished),
            "outcomes": self.outcomes,
        }


def evaluate(
    program: dspy.Module,
    examples: Sequence[dspy.Example],
    metric: Callable[..., Any] | Metric,
    *,
    session: Session | None = None,
    adapter: dspy.Adapter | None = None,
    num_threads: int | None = None,
    failure_score: float = 0.0,
    rollout_seconds: float = RolloutLimits.run_seconds,
    rollout_calls: int = RolloutLimits.run_calls,
    model: Literal["base"] | None = None,
) -> Evaluation:
    """The program's score at temperature 0 on `examples`, with the version its LM names, or the newest.

    `model="base"`: the model before any training answers in the policy's place, for any version that the
    program names, in a resumed run too. `num_threads`: runs at once; None is all of them, up to 64. Raises
    EndpointLost when no run got an answer, TrainingFailed when the metric never scores or no run ends in
    time, ValueError for a program without a predictor that uses the policy. An exception of the program is no
    error here: it is logged to stderr, and such a run counts `failure_score`.
    """
    if model not in (None, BASE_MODEL):
        raise ValueError(f"model is {BASE_MODEL!r} or None; a version is named with PolicyLM(model=…)")
    examples = check_examples("examples", examples)
    if not examples:
        raise ValueError("there are no examples to evaluate on")
    if not isinstance(metric, Metric):
        metric = Metric(metric, _MAX_METRIC_FAILURES)
    limits = RolloutLimits(num_threads, rollout_seconds, rollout_calls)
    trained = attach_policy(program, session or connect(), may_be_base=True)
    runner = Runner(program, trained, metric, strict_adapter(adapter), limits)
    found = evaluate_examples(runner, examples, failure_score, model=model)
    _log_crashes(found)
    return found


def evaluate_examples(
    runner: Runner,
    examples: Sequence[dspy.Example],
    failure_score: float = 0.0,
    workers: Workers[FinishedRun] | None = None,
    model: str | None = None,
    fatal: bool = False,
) -> Evaluation:
    """The same after the checks, within a training by its `workers`; its errors are those of `evaluate`.

    `model`: the version that replaces the newest, or the base. `fatal`: a program that raises in every run
    before the policy has answered is an error.
    """
    batch, uses_base = uuid.uuid4().hex[:12], runner.trained.uses_base

    def rollout(index: int) -> ProgramRollout:
        return ProgramRollout(
            f"eval-{batch}-{index}", runner.predictors, "eval", GREEDY, uses_base=uses_base, model=model
        )

    runs = [ProgramRun(example, index, rollout(index)) for index, example in enumerate(examples)]
    finished = run_all(runner, runs, workers)
    raise_if_unanswered(finished, "evaluation")
    if fatal and len(finished) >= _MIN_FATAL_RUNS and _failed_unanswered(finished):
        raise TrainingFailed(
            f"The program raised in every one of the evaluation's {len(finished)} runs",
            why=finished[0].reason,
            hint=f"{RUN_BY_HAND} set that is evaluated",
        )
    return _evaluation(finished, failure_score)


def _failed_unanswered(finished: Sequence[FinishedRun]) -> bool:
    """Whether the program failed in every run, and no answer of the policy can be the reason."""
    return all_failed(finished) and not any(it.run.rollout.answers for it in finished)


def _log_crashes(found: Evaluation) -> None:
    crashed = [it for it in found.finished if it.outcome == "crashed"]
    if crashed:
        summary = f"evaluation: score {found.score:.4g} · crashed {len(crashed)} of {len(found.finished)}"
        sys.stderr.write(f"slipway: {summary} · {sanitized(crashed[0].reason or '')}\n")
        sys.stderr.flush()


def _evaluation(finished: list[FinishedRun], failure_score: float) -> Evaluation:
    answered = [it for it in finished if it.outcome not in ("lost", "overdue")]
    scores = [_score(it, failure_score) for it in answered if it.outcome in _SCORED_OUTCOMES]
    versions = {version for it in finished for version in it.run.rollout.versions}
    return Evaluation(
        score=statistics.fmean(scores) if scores else math.nan,
        standard_error=standard_error.of_mean(scores),
        parse_rate=sum(it.parsed for it in answered) / len(answered),
        cut_off_rate=sum(it.cut_off for it in answered) / len(answered),
        version=max(versions, default=None),
        predictors=_by_predictor(answered),
        outcomes=dict(Counter[str](it.outcome for it in finished)),
        finished=tuple(finished),
        failure_score=failure_score,
    )


def raise_if_unanswered(
    finished: Sequence[FinishedRun], of: str, earlier: Sequence[FinishedRun] = ()
) -> None:
    """Raise when not one run came to an end: EndpointLost, or TrainingFailed when all were too slow.

    `earlier`: the runs that were done before these; slow ones gather behind them.
    """
    if any(it.outcome not in ("lost", "overdue") for it in finished):
        return
    lost = next((it for it in finished if it.outcome == "lost"), None)
    if lost is not None:
        raise EndpointLost(
            f"None of the {of}'s {len(finished)} rollouts got an answer",
            why=lost.reason,
            hint="`launch status` shows the run; its log says why it is gone",
        )
    if any(it.outcome != "overdue" for it in earlier):
        return
    raise TrainingFailed(
        f"None of the {of}'s {len(finished)} rollouts finished",
        why=finished[0].reason,
        hint="run the program once by hand; a slow one needs a larger rollout_seconds",
    )


def _score(finished: FinishedRun, failure_score: float) -> float:
    return failure_score if finished.score is None else finished.score.value


def _by_predictor(finished: list[FinishedRun]) -> dict[str, float]:
    """The mean of the metric's scores of single predictors, if it gives any."""
    scores: dict[str, list[float]] = {}
    for it in finished:
        for name, value in (it.score.predictors if it.score else {}).items():
            scores.setdefault(name, []).append(value)
    return {name: statistics.fmean(values) for name, values in scores.items()}
