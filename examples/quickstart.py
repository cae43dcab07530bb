"""Reinforcement learning on a DSPy program, on this computer, in a few minutes:

    launch -- python quickstart.py

A tiny model translates English phrases to French. Its reward is the number of different letters in its answer
(`--reward letters`), or 1 for the right translation (`--reward exact`). The same program learns on rented
GPUs: `launch --gpus H100 --model Qwen/Qwen2.5-1.5B-Instruct -- python quickstart.py`.
"""

import argparse
import json
import time

import dspy
from matplotlib.figure import Figure

from launcher.client import GRPO, PolicyLM, connect, evaluate
from runtime.tiny.grammar import distinct_letters, exact, held_out_phrases, training_phrases

# What each reward needs on the embedded model: a right translation is rarer than one letter more.
STEPS = {"letters": 40, "exact": 60}
EXAMPLES_PER_STEP = {"letters": 8, "exact": 16}
# Right or wrong says less about each phrase than its letters do, so more of them are asked.
HELD_OUT = {"letters": 100, "exact": 400}

REWARDS = {
    "letters": lambda example, prediction, trace=None: distinct_letters(prediction.french),
    "exact": lambda example, prediction, trace=None: exact(prediction.french, example.french),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Teach a tiny model French with a reward.")
    parser.add_argument("--reward", choices=REWARDS, default="letters")
    parser.add_argument("--steps", type=int, help="default: 40, or 60 for --reward exact")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()

    began = time.monotonic()
    run = connect()
    metric = REWARDS[asked.reward]
    program = dspy.Predict("english -> french")
    program.set_lm(PolicyLM(run, max_tokens=64))

    train = as_examples(training_phrases(240, asked.seed))
    held_out = as_examples(held_out_phrases(HELD_OUT[asked.reward] + 80))
    test, validation = held_out[:-80], held_out[-80:]

    before = evaluate(program, test, metric)
    optimizer = GRPO(
        metric,
        num_train_steps=asked.steps or STEPS[asked.reward],
        num_dspy_examples_per_grpo_step=EXAMPLES_PER_STEP[asked.reward],
        num_rollouts_per_grpo_step=8,
        num_steps_for_val=10,
        seed=asked.seed,
    )
    program = optimizer.compile(program, trainset=train, valset=validation)
    after = evaluate(program, test, metric)

    show(before, after, test)
    status = run.status()
    summary = {
        "reward": asked.reward,
        "seed": asked.seed,
        "steps": status.step,
        "model_path": status.model,
        "before": before.to_dict(),
        "after": after.to_dict(),
        "rise": after.difference(before),
        "rise_standard_error": after.difference_error(before),
        "seconds": round(time.monotonic() - began, 1),
        "training": optimizer.summary,
    }
    if run.run_dir:
        (run.run_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        draw(optimizer.history, f"compile {optimizer.summary['compile']}", run.run_dir / "reward.png")
        print(f"\nThe figures and the reward curve are in {run.run_dir}")


def as_examples(phrases):
    return [dspy.Example(english=it.english, french=it.french).with_inputs("english") for it in phrases]


def show(before, after, test) -> None:
    """A few answers side by side, then the scores."""
    answers = [[getattr(it.prediction, "french", "-") for it in found.finished] for found in (before, after)]
    print(f"\n{'english':<32}{'before':<40}after")
    for example, *pair in list(zip(test, *answers, strict=True))[:8]:
        was, now = (" ".join(answer.split()) for answer in pair)
        print(f"{example.english:<32.31}{was:<40.39}{now:.60}")
    rise, error = after.difference(before), after.difference_error(before)
    print(f"\nscore on {len(test)} held-out phrases: {before.score:.2f} -> {after.score:.2f}")
    print(
        f"rise {rise:+.2f} ±{error:.2f}; answers that parse {before.parse_rate:.0%} -> {after.parse_rate:.0%}"
    )


def draw(history, title, path) -> None:
    """The reward of each step's rollouts, and the greedy score of each validation."""
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    steps = [it for it in history if it["kind"] == "step"]
    checks = [it for it in history if it["kind"] == "validation"]
    axes.plot([it["step"] for it in steps], [it["reward"] for it in steps], label="rollouts (sampled)")
    axes.plot(
        [it["step"] for it in checks], [it["score"] for it in checks], "o--", label="validation (greedy)"
    )
    axes.set_xlabel("step")
    axes.set_ylabel("reward")
    axes.set_title(title)  # the next program on this endpoint has its own
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")


if __name__ == "__main__":
    main()
