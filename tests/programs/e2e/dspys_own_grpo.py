"""DSPy's own GRPO, as it comes, on the run it is started in: the held-out score before and after, as JSON.

launch -- python dspys_own_grpo.py SEED STEPS
"""

from __future__ import annotations

import json
import sys
from typing import Any

import dspy
from dspy.teleprompt.grpo import GRPO

from launcher.client import PolicyLM, connect
from runtime.tiny.grammar import held_out_phrases, training_phrases


def examples(phrases: Any) -> list[dspy.Example]:
    return [dspy.Example(english=it.english, french=it.french).with_inputs("english") for it in phrases]


def letters(example: dspy.Example, prediction: dspy.Prediction, trace: Any = None) -> float:
    """How many different letters the answer has."""
    return len(set(prediction.french.lower()) & set("abcdefghijklmnopqrstuvwxyz")) / 26


def main() -> None:
    seed, steps = int(sys.argv[1]), int(sys.argv[2])
    run = connect()
    program: Any = dspy.Predict("english -> french")
    program.set_lm(PolicyLM(run, max_tokens=64))
    evaluate = dspy.Evaluate(devset=examples(held_out_phrases(100)), metric=letters, num_threads=16)
    before = evaluate(program).score
    optimizer = GRPO(
        metric=letters, exclude_demos=True, num_train_steps=steps, num_threads=16, seed=seed,
        num_dspy_examples_per_grpo_step=8, num_rollouts_per_grpo_step=8,
    )  # fmt: skip
    program = optimizer.compile(program, trainset=examples(training_phrases(120, seed)))
    after = evaluate(program).score
    counts = [run.wait(step).counts.model_dump() for step in range(1, run.version + 1)]
    assert run.run_dir is not None
    found = {"before": before, "after": after, "counts": counts}
    (run.run_dir / "dspys_own.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
