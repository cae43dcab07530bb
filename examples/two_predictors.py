"""A program of two predictors, trained together: there (English to French) and back (French to English).

    launch -- python two_predictors.py

Each predictor has a group of its own in every step, and a score of its own: the first for the different
letters in its French, the second for its right words.
"""

import argparse
import json

import dspy
from matplotlib.figure import Figure

from launcher.client import GRPO, PolicyLM, connect, evaluate
from runtime.tiny.grammar import LETTERS, distinct_letters, held_out_phrases, training_phrases


class ThereAndBack(dspy.Module):
    def __init__(self):
        super().__init__()
        self.there = dspy.Predict("english -> french")
        self.back = dspy.Predict("french -> english")

    def forward(self, english, french):
        there, back = self.there(english=english), self.back(french=french)
        return dspy.Prediction(french=there.french, english=back.english)


def metric(example, prediction, trace=None):
    there = distinct_letters(prediction.french) / LETTERS
    back = right_words(prediction.english, example.english)
    return dspy.Prediction(score=(there + back) / 2, predictor_scores={"there": there, "back": back})


def right_words(answer, reference):
    """The share of the words that are right and in their place."""
    given, wanted = answer.lower().split(), reference.split()
    return sum(a == b for a, b in zip(given, wanted, strict=False)) / max(len(given), len(wanted))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train two predictors of one program together.")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()

    run = connect()
    program = ThereAndBack()
    program.set_lm(PolicyLM(run, max_tokens=64))
    train = as_examples(training_phrases(240, asked.seed))
    test = as_examples(held_out_phrases(100))

    before = evaluate(program, test, metric)
    optimizer = GRPO(
        metric,
        num_train_steps=asked.steps,
        num_dspy_examples_per_grpo_step=8,
        num_rollouts_per_grpo_step=8,
        seed=asked.seed,
    )
    program = optimizer.compile(program, trainset=train)
    after = evaluate(program, test, metric)

    for name, score in after.predictors.items():
        print(f"{name:<8}{before.predictors.get(name, 0.0):.3f} -> {score:.3f}")
    print(f"{'both':<8}{before.score:.3f} -> {after.score:.3f}")
    if run.run_dir:
        summary = {"before": before.to_dict(), "after": after.to_dict(), "training": optimizer.summary}
        (run.run_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        draw(optimizer.history, f"compile {optimizer.summary['compile']}", run.run_dir / "reward.png")


def as_examples(phrases):
    examples = (dspy.Example(english=it.english, french=it.french) for it in phrases)
    return [example.with_inputs("english", "french") for example in examples]


def draw(history, title, path) -> None:
    """One curve for each predictor."""
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    for name in history[0]["rewards"]:
        axes.plot([it["step"] for it in history], [it["rewards"].get(name) for it in history], label=name)
    axes.set_xlabel("step")
    axes.set_ylabel("reward")
    axes.set_title(title)  # the next program on this endpoint has its own
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")


if __name__ == "__main__":
    main()
