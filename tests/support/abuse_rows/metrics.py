"""What metrics do: what they take, return and raise, and how long it takes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import dspy
import numpy as np

from tests.support.abuse_rows.row import LENGTHS, Abuse, tagged_examples


def slow_for_some(example: dspy.Example, prediction: dspy.Prediction, trace: Any = None) -> float:
    if prediction.french == "mot":
        time.sleep(12)
    return float(len(prediction.french))


async def asynchronous(example: dspy.Example, prediction: dspy.Prediction, trace: Any = None) -> float:
    await asyncio.sleep(0)
    return float(len(prediction.french))


def writes_into_the_example(example: dspy.Example, prediction: dspy.Prediction, trace: Any = None) -> float:
    example["tags"].append("seen")
    example["french"] = prediction.french
    return float(len(prediction.french) + 10 * len(example["tags"]))


class Judge(dspy.Module):
    """A metric that is a module, as dspy.evaluate's are."""

    def forward(self, example: dspy.Example, prediction: dspy.Prediction, trace: Any = None) -> float:
        return float(len(prediction.french))


def returning(value: Any) -> Callable[..., Any]:
    return lambda example, prediction, trace=None: value


def raising(error: BaseException) -> Callable[..., Any]:
    def metric(example: dspy.Example, prediction: dspy.Prediction, trace: Any = None) -> float:
        raise error

    return metric


METRICS = [
    Abuse(
        "raises always",
        metric=raising(KeyError("no such column")),
        asked_for={"num_train_steps": 9},
        says=r"The metric gave no score 16 times in a row\n"
        r"it raised KeyError: 'no such column'\nHint: the last failure was on Example",
        exit=6,
    ),
    Abuse(
        "raises always, with fewer rollouts than make it sure",
        metric=raising(KeyError("no such column")),
        says=r"Nothing was trained in 1 step\n"
        r"rollouts: 8 unscored; samples left out: 8 unscored: the metric raised KeyError"
        r"(.|\n)*step 1 trained nothing: no sample of this step can be trained",
        outcomes={"unscored": 8},
        exit=6,
    ),
    Abuse(
        "raises on every validation example",
        metric=raising(KeyError("no such column")),
        valset=tagged_examples,
        says=r"The metric scored none of the 2 validation examples\nthe metric raised KeyError",
        exit=6,
    ),
    Abuse(
        "calls sys.exit",
        metric=raising(SystemExit(0)),
        asked_for={"num_train_steps": 9},
        says=r"it raised SystemExit: 0",
        exit=6,
    ),
    Abuse("returns None", metric=returning(None), says="the metric returned None", exit=6),
    Abuse("returns NaN", metric=returning(float("nan")), says="the metric returned nan", exit=6),
    Abuse("returns infinity", metric=returning(float("inf")), says="the metric returned inf", exit=6),
    Abuse("returns more than a reward can hold", metric=returning(1e300), says=r"returned 1e\+300", exit=6),
    Abuse("returns a text", metric=returning("good"), says="returned str, not a number", exit=6),
    Abuse("returns a number as text", metric=returning("0.5"), says="returned str, not a number", exit=6),
    Abuse("returns a dict", metric=returning({"score": 1}), says="returned dict, not a number", exit=6),
    Abuse(
        "returns a Prediction without a score",
        metric=returning(dspy.Prediction(feedback="hm")),
        says="returned a Prediction without a score",
        exit=6,
    ),
    Abuse("returns a bool", metric=lambda e, p, trace=None: len(p.french) > 4, rewards={0.0, 1.0}),
    Abuse("returns an int", metric=lambda e, p, trace=None: len(p.french), rewards=LENGTHS),
    Abuse("returns a numpy float", metric=lambda e, p, t=None: np.float32(len(p.french)), rewards=LENGTHS),
    Abuse(
        "returns a numpy bool", metric=lambda e, p, t=None: np.bool_(len(p.french) > 4), rewards={0.0, 1.0}
    ),
    Abuse(
        "returns a Prediction with score and feedback",
        metric=lambda e, p, trace=None: dspy.Prediction(score=len(p.french), feedback="well done"),
        rewards=LENGTHS,
    ),
    Abuse("takes two arguments", metric=lambda e, p: len(p.french), rewards=LENGTHS),
    Abuse("takes GEPA's five arguments", metric=lambda g, p, t, n, nt: len(p.french), rewards=LENGTHS),
    Abuse("takes any arguments", metric=lambda *words: len(words[1].french), rewards=LENGTHS),
    Abuse("is asynchronous", metric=asynchronous, rewards=LENGTHS),
    Abuse("is a module, as dspy.evaluate's are", metric=Judge(), rewards=LENGTHS),
    Abuse(
        "takes one argument",
        metric=lambda prediction: 1.0,
        says="must take \\(example, prediction, trace=None\\)",
        error=TypeError,
        exit=6,
    ),
    Abuse("is no function", metric="exact", says="is not a function", error=TypeError, exit=6),  # type: ignore[arg-type]
    Abuse(
        "is slow for some: those runs are excluded, not zero",
        metric=slow_for_some,
        asked_for={"rollout_seconds": 5},
        says="the metric gave no score within 5 s",
        outcomes={"overdue": 2, "scored": 6},
        rewards={None, 4.0, 5.0, 6.0},
    ),
    Abuse(
        "writes into the example: into its own copy",
        metric=writes_into_the_example,
        trainset=tagged_examples,
        rewards={13.0, 14.0, 15.0, 16.0},
    ),
    Abuse(
        "judges a predictor the program does not have",
        metric=lambda e, p, t=None: dspy.Prediction(score=len(p.french), predictor_scores={"frist": 1.0}),
        says="scores a predictor 'frist', which the program does not have; it has self",
        rewards=LENGTHS,
    ),
]
