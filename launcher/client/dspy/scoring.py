"""A user's metric as a score or the reason there is none.

Neighbours: `rollouts.py` scores each finished run of the program here. A metric may return a number, a bool,
or a `dspy.Prediction` with a `score`; it may take two to five arguments (example, prediction, trace, and
GEPA's pred_name and pred_trace); it may be asynchronous. A run that it cannot judge has no score: it is
excluded and counted, never a zero (C22). Knows nothing of rollouts, groups or training.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import dspy

from launcher.client.failures import TrainingFailed

_MAX_ARGUMENTS = 5
# A reward travels and is trained as float32.
_MAX_REWARD = 3.4e38


@dataclass(frozen=True)
class MetricScore:
    """`value` for the whole program; `predictors` if the metric judges some of them one by one."""

    value: float
    predictors: Mapping[str, float] = field(default_factory=dict)

    def of(self, predictor: str) -> float:
        return self.predictors.get(predictor, self.value)


class Unscored(Exception):  # noqa: N818 - the name is the event
    """The metric gave no score; the text is the reason."""


class Metric:
    """Calls a user's metric, from several threads. Raises TypeError for a function that cannot be one.

    `max_failures` exceptions or unusable answers in a row, with no score between them, end the training with
    the metric's own message: a metric that always fails must not be mistaken for a run (G19).
    """

    def __init__(self, function: Callable[..., Any], max_failures: int) -> None:
        self._function = function
        self._arity = metric_arity(function)
        self._max_failures = max_failures
        self._failures_in_a_row = 0
        self._lock = threading.Lock()

    def score(self, example: dspy.Example, prediction: Any) -> MetricScore:
        """Raises Unscored with the reason, and TrainingFailed when it has failed too often in a row."""
        arguments = (example, prediction, None, None, None)[: self._arity]
        try:
            answer = self._function(*arguments)
            score = _parse_result(asyncio.run(_awaited(answer)) if inspect.isawaitable(answer) else answer)
        except Unscored as error:
            self._count_failure(error, example)
            raise
        except (Exception, SystemExit) as error:
            self._count_failure(error, example)
            raise Unscored(f"the metric raised {type(error).__name__}: {error}") from error
        with self._lock:
            self._failures_in_a_row = 0
        return score

    def _count_failure(self, error: BaseException, example: dspy.Example) -> None:
        with self._lock:
            self._failures_in_a_row += 1
            is_enough = self._failures_in_a_row >= self._max_failures
        if is_enough:
            what = str(error) if isinstance(error, Unscored) else f"it raised {type(error).__name__}: {error}"
            raise TrainingFailed(
                f"The metric gave no score {self._max_failures} times in a row",
                why=what,
                hint=f"the last failure was on {_preview(example)}",
            ) from error


def metric_arity(function: Callable[..., Any]) -> int:
    """The number of positional arguments: three as DSPy does, fewer or more if the metric requires it."""
    name = getattr(function, "__name__", None) or repr(function)
    if not callable(function):
        raise TypeError(f"metric {name} is not a function: it must take (example, prediction, trace=None)")
    called = getattr(type(function), "forward", None) if isinstance(function, dspy.Module) else function
    try:
        parameters = list(inspect.signature(called or function).parameters.values())
    except (TypeError, ValueError):  # built in C: has no signature
        return 3
    if isinstance(function, dspy.Module):
        parameters = parameters[1:]  # self
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    accepted = [it for it in parameters if it.kind in kinds]
    others = [it for it in parameters if it.kind is inspect.Parameter.KEYWORD_ONLY]
    required = sum(it.default is inspect.Parameter.empty for it in accepted)
    if any(it.default is inspect.Parameter.empty for it in others) or required > _MAX_ARGUMENTS:
        raise TypeError(_wrong_shape(name))
    if any(it.kind is inspect.Parameter.VAR_POSITIONAL for it in parameters):
        return max(3, len(accepted))
    if len(accepted) < 2:
        raise TypeError(_wrong_shape(name))
    return min(len(accepted), max(3, required))


def _wrong_shape(name: str) -> str:
    return f"metric {name!r} must take (example, prediction, trace=None), or GEPA's five arguments"


async def _awaited(answer: Awaitable[Any]) -> Any:
    return await answer


def _parse_result(answer: Any) -> MetricScore:
    if isinstance(answer, dspy.Prediction):
        if "score" not in answer:
            raise Unscored("the metric returned a Prediction without a score")
        predictors = answer.get("predictor_scores") or {}
        return MetricScore(_number(answer["score"]), {name: _number(it) for name, it in predictors.items()})
    return MetricScore(_number(answer))


def _number(value: Any) -> float:
    if value is None:
        raise Unscored("the metric returned None")
    if isinstance(value, (str, bytes)):  # a number as text, such as "0.5", is surely a mistake
        raise Unscored(f"the metric returned {type(value).__name__}, not a number")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise Unscored(f"the metric returned {type(value).__name__}, not a number") from None
    if not math.isfinite(number) or abs(number) > _MAX_REWARD:
        raise Unscored(f"the metric returned {number}")
    return number


def _preview(example: dspy.Example) -> str:
    text = repr(example)
    return text if len(text) <= 300 else f"{text[:300]} …"
