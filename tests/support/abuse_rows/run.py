"""What the run does that is trained on: it goes away, fails a step or refuses it."""

from __future__ import annotations

from launcher.client import EndpointLost, StepFailed
from tests.support import abuses as a
from tests.support.abuse_rows.row import ALL, Abuse
from tests.support.small_run import Asked, SmallRun


def away_after_a_step(run: SmallRun) -> None:
    """The endpoint goes in the middle of the second step's rollouts, for good."""

    def answer(asked: Asked) -> str:
        if run.requests:
            run.go()
        return a.varied(asked)

    run.answer = answer


def fails_the_step(run: SmallRun) -> None:
    run.fail_step = "out of memory"


RUN = [
    Abuse(
        "goes away for good in the middle of a step",
        before=away_after_a_step,
        asked_for={"num_train_steps": 50, "num_threads": 2},
        says=r"None of the step's 8 rollouts got an answer\nNo answer from the run",
        outcomes={"scored": 8, "lost": 8},
        counts={"steps": 1},
        error=EndpointLost,
        exit=6,
    ),
    Abuse(
        "fails a training step",
        before=fails_the_step,
        asked_for={"num_train_steps": 50},
        says=r"Step 1 failed\nout of memory\nHint: the policy before it is still served",
        outcomes=ALL,
        error=StepFailed,
        exit=6,
    ),
    Abuse(
        "refuses each step, as nothing in it can be trained",
        metric=lambda e, p, t=None: None if len(e.english) else 1.0,
        asked_for={
            "num_train_steps": 50,
            "num_rollouts_per_grpo_step": 2,
            "num_dspy_examples_per_grpo_step": 1,
        },
        says=r"Nothing could be trained in 3 steps in a row\nno sample of this step can be trained"
        r"(.|\n)*the last rollouts ended like this: 2 unscored",
        counts={"empty_steps": 3, "dropped": {"unscored: the metric returned None": 6}},
        exit=6,
    ),
]
