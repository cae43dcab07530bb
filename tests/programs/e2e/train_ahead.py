"""Trains ahead of itself, for runs that are killed again and again: a validation beside, flat groups, stragglers.

    launch -- python train_ahead.py STEPS [PROGRAM'S OWN PLACE TO SAY ITS PID]

Every third example is flat, so that another is rolled out in its place; the first is a straggler: its runs end
once three more steps are done, when they are too old. Each `compile` says in `begun.jsonl` of the run's folder
with which process it begins, and where.
"""

from __future__ import annotations

import json
import os
import sys
import time

import dspy

from launcher.client import GRPO, PolicyLM, connect

EXAMPLES, PER_STEP, ROLLOUTS, STALENESS = 13, 2, 4, 2
STRAGGLER_SECONDS = 60.0
_POLL_SECONDS = 0.1


class Program(dspy.Module):
    """One call; after it a straggler waits until what it was answered is too old, or no step is left for that."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.write = dspy.Predict("english -> french")
        self.steps = steps

    def forward(self, english: str) -> dspy.Prediction:
        answered = self.write(english=english)
        if english.startswith("0 ") and dspy.settings.get("trace") is not None:
            self.straggle()
        return answered

    def straggle(self) -> None:
        """Until three more steps are done."""
        until, begun = time.monotonic() + STRAGGLER_SECONDS, connect().status().step
        while time.monotonic() < until:
            step = connect().status().step
            if step > begun + STALENESS or step >= self.steps - STALENESS:
                return
            time.sleep(_POLL_SECONDS)


def metric(example: dspy.Example, prediction: dspy.Prediction, trace: object = None) -> float:
    """The length of an answer; nothing is to learn from every third example."""
    return 0.0 if int(example.english.split()[0]) % 3 == 2 else float(len(prediction.french))


def data(count: int) -> list[dspy.Example]:
    return [dspy.Example(english=f"{i} cats", french="").with_inputs("english") for i in range(count)]


def optimizer(steps: int) -> GRPO:
    return GRPO(
        metric,
        num_train_steps=steps,
        num_dspy_examples_per_grpo_step=PER_STEP,
        num_rollouts_per_grpo_step=ROLLOUTS,
        num_steps_for_val=4,
        staleness=STALENESS,
        dynamic_sampling=True,
        checkpoint="none",
        seed=5,
        train_kwargs={"learning_rate": 1e-5},
    )


def main(steps: int) -> None:
    session = connect()
    assert session.run_dir is not None
    state = session.status().client_state
    with (session.run_dir / "begun.jsonl").open("a") as file:
        file.write(json.dumps({"pid": os.getpid(), "state": state}) + "\n")
    student = Program(steps)
    student.set_lm(PolicyLM(session, max_tokens=16))
    grpo = optimizer(steps)
    grpo.compile(student, trainset=data(EXAMPLES), valset=data(EXAMPLES + 8)[EXAMPLES:])
    (session.run_dir / "summary.json").write_text(json.dumps(grpo.summary))


if __name__ == "__main__":
    main(int(sys.argv[1]))
