"""A label task as one writes it who has read the guides: support tickets, sorted into three teams by DSPy.

    launch --model tiny-agent -- python tickets.py SEED

The teams have names that say little, so that what belongs to each is learned from the reward alone.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any, Literal

import dspy

from launcher.client import GRPO, PolicyLM, connect, evaluate

THINGS = {
    "alpha": ("invoice", "bill", "payment", "refund", "charge", "fee"),
    "beta": ("parcel", "delivery", "package", "shipment", "courier", "box"),
    "gamma": ("password", "login", "account", "error", "screen", "browser"),
}
FORMS = (
    "I have a question about my {}.", "Something is wrong with the {}.", "Please check the {} again.",
    "Where can I find the {}?", "The {} is not what I wanted.", "Hello, it is about the {}.",
)  # fmt: skip


class Sort(dspy.Signature):
    """Sort the ticket."""

    ticket: str = dspy.InputField()
    team: Literal["alpha", "beta", "gamma"] = dspy.OutputField()


def right(example: dspy.Example, prediction: dspy.Prediction, trace: Any = None) -> float:
    return float(prediction.team == example.team)


def main(seed: int) -> None:
    rows = [
        (form.format(thing), team) for team, things in THINGS.items() for thing in things for form in FORMS
    ]
    random.Random(0).shuffle(rows)
    examples = [dspy.Example(ticket=ticket, team=team).with_inputs("ticket") for ticket, team in rows]
    train, held_out = examples[:58], examples[58:]
    program = dspy.Predict(Sort)
    program.set_lm(PolicyLM(connect(), max_tokens=64))
    before = evaluate(program, held_out, right)
    optimizer = GRPO(
        right,
        num_train_steps=20,
        num_dspy_examples_per_grpo_step=8,
        num_rollouts_per_grpo_step=8,
        seed=seed,
    )
    trained = optimizer.compile(program, trainset=train)
    after = evaluate(trained, held_out, right)
    rise = {"rise": after.difference(before), "standard_error": after.difference_error(before)}
    print(json.dumps({"before": before.score, "after": after.score, **rise}))


main(int(sys.argv[1]))
