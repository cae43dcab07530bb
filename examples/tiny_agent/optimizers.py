"""DSPy's prompt optimisers on the embedded agent model, which writes the proposals, too.

    launch --model FOLDER -- python -m examples.tiny_agent.optimizers --out FILE

Each starts from the same program for one labelled task. Printed: its score before and after on held-out
examples, how many instructions were tried, and the calls that failed. Neighbours: `figures.py` measures the
rest.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

import dspy
from dspy.utils.callback import BaseCallback

from examples.tiny_agent import words
from examples.tiny_agent.programs import is_right
from launcher.client import PolicyLM, connect, evaluate

TRAIN, VALIDATION, HELD_OUT = 40, 60, 200
THREADS = 8
Topic = Literal["sport", "food", "travel", "music"]
TOPICS: tuple[str, ...] = get_args(Topic)


class SortMessage(dspy.Signature):
    """Sort the message."""

    message: str = dspy.InputField()
    topic: Topic = dspy.OutputField()


class Calls(BaseCallback):
    """The instructions that were tried, and the errors of calls and of parsing."""

    def __init__(self) -> None:
        self.instructions: set[str] = set()
        self.errors: list[str] = []

    def on_adapter_format_start(self, call_id: str, instance: Any, inputs: dict[str, Any]) -> None:
        signature = inputs["signature"]
        if "topic" in signature.output_fields:
            self.instructions.add(signature.instructions)

    def on_adapter_parse_end(
        self, call_id: str, outputs: Any | None, exception: BaseException | None = None
    ) -> None:
        self._note(exception)

    def on_lm_end(self, call_id: str, outputs: Any | None, exception: BaseException | None = None) -> None:
        self._note(exception)

    def _note(self, exception: BaseException | None) -> None:
        if exception is not None:
            self.errors.append(f"{type(exception).__name__}: {exception}"[:300])


def examples() -> list[dspy.Example]:
    """Messages of four topics, made of the model's own words."""
    rng = random.Random("optimizers")
    topics = {name: it for it in words.SUBJECTS["topic"] for name in it.names if name in TOPICS}
    made = []
    for number in range(TRAIN + VALIDATION + HELD_OUT):
        topic = TOPICS[number % len(TOPICS)]
        cue, cue2 = rng.sample(topics[topic].cues, 2)
        noun, noun2 = rng.sample(words.NOUNS, 2)
        text = rng.choice(words.ABOUT).format(
            cue=cue, cue2=cue2, noun=noun, noun2=noun2,
            name=rng.choice(words.NAMES), city=rng.choice(words.CITIES), day=rng.choice(words.DAYS),
        )  # fmt: skip
        made.append(dspy.Example(message=text, topic=topic).with_inputs("message"))
    return made


def mipro(program: Any, lm: dspy.LM, train: list[Any], validation: list[Any]) -> Any:
    """MIPROv2: instructions and demonstrations, chosen by Bayesian search."""
    optimizer = dspy.MIPROv2(
        metric=is_right, prompt_model=lm, task_model=lm, auto=None, num_candidates=6, num_threads=THREADS
    )
    return optimizer.compile(program, trainset=train, valset=validation, num_trials=12, minibatch=False)


def simba(program: Any, lm: dspy.LM, train: list[Any], validation: list[Any]) -> Any:
    """SIMBA: advice and demonstrations from good and bad tries."""
    metric: Any = is_right
    optimizer = dspy.SIMBA(
        metric=metric, prompt_model=lm, bsize=20, num_candidates=4, max_steps=4, num_threads=THREADS
    )
    return optimizer.compile(program, trainset=train + validation, seed=0)


def gepa(program: Any, lm: dspy.LM, train: list[Any], validation: list[Any]) -> Any:
    """GEPA: instructions from feedback."""

    def metric(example: Any, prediction: Any, trace: Any = None, *_: Any) -> dspy.Prediction:
        right = is_right(example, prediction)
        feedback = "Correct." if right else f"Wrong. The right answer is {example.topic}."
        return dspy.Prediction(score=float(right), feedback=feedback)

    told: Any = metric
    optimizer = dspy.GEPA(metric=told, max_metric_calls=600, reflection_lm=lm, num_threads=THREADS)
    return optimizer.compile(program, trainset=train, valset=validation)


OPTIMIZERS: dict[str, Callable[..., Any]] = {"mipro": mipro, "simba": simba, "gepa": gepa}


def measured(name: str) -> dict[str, Any]:
    """One optimiser from the plain program on: its figures."""
    run, rows, calls = connect(), examples(), Calls()
    train, validation, held_out = rows[:TRAIN], rows[TRAIN : TRAIN + VALIDATION], rows[TRAIN + VALIDATION :]
    lm = PolicyLM(run)
    program = dspy.Predict(SortMessage)
    before = evaluate(program, held_out, is_right)
    with dspy.context(lm=lm, callbacks=[calls]):
        best = OPTIMIZERS[name](program.deepcopy(), lm, train, validation)
    after = evaluate(best, held_out, is_right)
    return {
        "before": round(before.score, 3),
        "after": round(after.score, 3),
        "difference": round(after.difference(before), 3),
        "standard_error": round(after.difference_error(before), 3),
        "instructions_tried": len(calls.instructions),
        "failed_calls": len(calls.errors),
        "errors": calls.errors[:5],
        "instruction": best.signature.instructions,
        "demos": len(best.demos),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="DSPy's prompt optimisers on the embedded agent model.")
    parser.add_argument("--only", choices=[*OPTIMIZERS], action="append")
    parser.add_argument("--out", type=Path, help="JSON file; its other entries are kept")
    options = parser.parse_args()
    found = {name: measured(name) for name in options.only or OPTIMIZERS}
    print(json.dumps(found, indent=2))
    if options.out:
        before = json.loads(options.out.read_text()) if options.out.is_file() else {}
        options.out.write_text(json.dumps(before | {"optimizers": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
