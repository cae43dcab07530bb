"""A user's metric as a score or the reason there is none.

Neighbours: `rollouts.py` scores each finished run of the program here.
A metric may return a number, a bool, or a `dspy.Prediction` with a `score`, and may take two to five
arguments (example, prediction, trace, and GEPA's pred_name and pred_trace). What it cannot judge has no
score: it is excluded and counted, never a zero (C22). Knows nothing of rollouts, groups or training.
"""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import dspy

from launcher.client.errors import TrainingFailed

_ARGUMENTS = 5


@dataclass(frozen=True)
class Score:
    """`value` for the whole program; `predictors` where the metric judges some of them by themselves."""

    value: float
    predictors: Mapping[str, float] = field(default_factory=dict)

    def of(self, predictor: str) -> float:
        return self.predictors.get(predictor, self.value)


class Unscored(Exception):  # noqa: N818 - this name says what happened
    """The metric gave no score; the text is the reason."""


class Metric:
    """Calls a user's metric, from several threads.

    `patience` exceptions or unusable answers in a row, with no score between them, end the training with the
    metric's own message: a metric that always fails must not be mistaken for a run (G19).
    """

    def __init__(self, function: Callable[..., Any], patience: int) -> None:
        self._function = function
        self._arity = _positional(function)
        self._patience = patience
        self._failures_in_a_row = 0
        self._lock = threading.Lock()

    def score(self, example: dspy.Example, prediction: Any) -> Score:
        """Raises Unscored with the reason, and TrainingFailed when it has failed too often in a row."""
        arguments = (example, prediction, None, None, None)[: self._arity]
        try:
            score = _read(self._function(*arguments))
        except Unscored as error:
            self._failed(error, example)
            raise
        except Exception as error:
            self._failed(error, example)
            raise Unscored(f"the metric raised {type(error).__name__}: {error}") from error
        with self._lock:
            self._failures_in_a_row = 0
        return score

    def _failed(self, error: Exception, example: dspy.Example) -> None:
        with self._lock:
            self._failures_in_a_row += 1
            count = self._failures_in_a_row
        if count >= self._patience:
            what = str(error) if isinstance(error, Unscored) else f"it raised {type(error).__name__}: {error}"
            raise TrainingFailed(
                f"The metric gave no score {count} times in a row",
                why=what,
                hint=f"it failed last on {example!r}",
            ) from error


def _positional(function: Callable[..., Any]) -> int:
    """How many positional arguments to call with: three as DSPy does, fewer or more where it must be so."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # built in C: has no signature
        return 3
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [it for it in parameters if it.kind in kinds]
    if any(it.kind is inspect.Parameter.VAR_POSITIONAL for it in parameters):
        return max(3, len(positional))
    required = sum(it.default is inspect.Parameter.empty for it in positional)
    if len(positional) < 2 or required > _ARGUMENTS:
        raise TypeError(
            f"metric {getattr(function, '__name__', function)!r} should take "
            "(example, prediction, trace=None), or GEPA's five arguments"
        )
    return min(len(positional), max(3, required))


def _read(answer: Any) -> Score:
    if isinstance(answer, dspy.Prediction):
        value = answer.get("score")
        predictors = answer.get("predictor_scores") or {}
        return Score(_number(value), {name: _number(it) for name, it in predictors.items()})
    return Score(_number(answer))


def _number(value: Any) -> float:
    if value is None:
        raise Unscored("the metric returned None")
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise Unscored(f"the metric returned {type(value).__name__}, not a number") from None
    if not math.isfinite(number):
        raise Unscored(f"the metric returned {number}")
    return number
