"""Trains ahead of itself, for runs that are killed again and again; some examples are flat or stragglers.

    launch -- python train_ahead.py STEPS

Every third example is flat, so that others are rolled out besides; the first is a straggler: its runs end
once three more steps are done, when they are too old. Each life says in `begun.jsonl` of the run's folder
which process it is, and the place that it goes on from.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import dspy

from launcher.client import GRPO, PolicyLM, connect
from launcher.client.dspy.sampler import EpochSampler
from launcher.client.dspy.training import Training
from launcher.client.dspy.training_place import PROGRAM_VARIABLE
from launcher.client.session import Session

EXAMPLES, PER_STEP, ROLLOUTS, STALENESS, VALIDATED_EVERY, SEED = 13, 2, 4, 2, 4, 5
BEGUN, SUMMARY = "begun.jsonl", "summary.json"
_STRAGGLER_SECONDS = 30.0
_POLL_SECONDS = 0.1


class SayingWhere(Training):
    """The loop, which says first where it goes on."""

    def run(self) -> None:
        assert self.session.run_dir is not None
        said = {
            "pid": os.getpid(),
            "life": os.environ[PROGRAM_VARIABLE],
            "time": time.time(),
            "place": self.place.client_state(self.place.step),
        }
        with (self.session.run_dir / BEGUN).open("a") as file:
            file.write(json.dumps(said) + "\n")
        super().run()


class AheadGRPO(GRPO):
    """GRPO around that loop."""

    _training_class = SayingWhere


class Program(dspy.Module):
    """One call; after it a straggler waits until its answer is too old, or no step is left for it."""

    def __init__(self, session: Session, steps: int) -> None:
        super().__init__()
        self.write = dspy.Predict("english -> french")
        self._step = lambda: session.status().step
        self._last = steps - STALENESS

    def forward(self, english: str) -> dspy.Prediction:
        begun = self._step()
        answered = self.write(english=english)
        if english.startswith("0 "):
            until = time.monotonic() + _STRAGGLER_SECONDS
            while (
                begun + STALENESS >= self._step() and self._step() < self._last and time.monotonic() < until
            ):
                time.sleep(_POLL_SECONDS)
        return answered


def metric(example: dspy.Example, prediction: dspy.Prediction, trace: object = None) -> float:
    """The length of an answer; nothing is to learn from every third example."""
    return -1.0 if int(example.english.split()[0]) % 3 == 2 else float(len(prediction.french))


def data(count: int) -> list[dspy.Example]:
    return [dspy.Example(english=f"{i} cats", french="").with_inputs("english") for i in range(count)]


def sampler() -> EpochSampler:
    """Which examples the steps take, by their numbers."""
    return EpochSampler(EXAMPLES, PER_STEP, SEED)


def main(steps: int, folder: Path | None) -> None:
    session = connect()
    assert folder is not None
    student = Program(session, steps)
    student.set_lm(PolicyLM(session, max_tokens=24))
    grpo = AheadGRPO(
        metric,
        num_train_steps=steps,
        num_dspy_examples_per_grpo_step=PER_STEP,
        num_rollouts_per_grpo_step=ROLLOUTS,
        num_steps_for_val=VALIDATED_EVERY,
        staleness=STALENESS,
        dynamic_sampling=True,
        checkpoint="none",
        seed=SEED,
        train_kwargs={"learning_rate": 1e-5},
        session=session,
    )
    grpo.compile(student, trainset=data(EXAMPLES), valset=data(EXAMPLES + 8)[EXAMPLES:])
    (folder / SUMMARY).write_text(json.dumps(grpo.summary))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(os.environ["LAUNCH_RUN_DIR"]))
