"""The smallest program that trains with DSPy: `launch -- python hello.py`. A tiny model learns French.

Cost and duration: offline $0.00 and two minutes on 2 busy cores; rented about $2 and half an hour on one H100
(estimated)."""

import dspy

from launcher.client import GRPO, PolicyLM, connect, evaluate

NOUNS = {"house": "maison", "table": "table", "car": "voiture", "door": "porte", "flower": "fleur"}
COLOURS = {"black": "noire", "white": "blanche", "green": "verte", "blue": "bleue", "grey": "grise"}
DETERMINERS = {"the": "la", "a": "une", "my": "ma", "this": "cette"}


def exact_match(example, prediction, trace=None):  # the reward: 1 for the right translation, else 0
    return float(prediction.french.strip() == example.french)


phrases = [(word, colour, noun) for word in DETERMINERS for colour in COLOURS for noun in NOUNS]
pairs = [(f"{w} {c} {n}", f"{DETERMINERS[w]} {NOUNS[n]} {COLOURS[c]}") for w, c, n in phrases]
examples = [dspy.Example(english=english, french=french).with_inputs("english") for english, french in pairs]
train, held_out = examples[::2], examples[1::2]

program = dspy.Predict("english -> french")
program.set_lm(PolicyLM(connect(), max_tokens=32))  # the model that `launch` serves and trains
before = evaluate(program, held_out, exact_match, model="base")  # as it was before training
optimizer = GRPO(exact_match, num_train_steps=15, num_dspy_examples_per_grpo_step=8)
program = optimizer.compile(program, trainset=train)
after = evaluate(program, held_out, exact_match)
print(f"held-out: {before.score:.2f} → {after.score:.2f} of {len(held_out)} phrases are right")
