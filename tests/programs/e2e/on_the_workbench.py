"""A user's program on a held endpoint: `python on_the_workbench.py METRIC SEED STEPS RESULT [OPTIONS]`.

It trains so many steps, or `--compiles` times so many, one after the other, or (`--together`) inside
dspy.BetterTogether, whose candidates are then scored once more. With `--until FILE` the rollouts of the step
`--hold-at` wait for that file. RESULT gets as JSON: `compiles`, what each training says of itself;
`exchanges`, greedy requests that name what was compiled, with the texts that answered and their tokens'
logprobs; `candidates`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dspy
from openai import OpenAI

from launcher.client import GRPO, PolicyLM, Session, connect
from runtime.tiny.chat import messages
from runtime.tiny.grammar import Phrase, distinct_letters, held_out_phrases, training_phrases
from tests.support.waiting import wait_until

EXAMPLES = ROLLOUTS = 4
TOKENS = 48
ASKED_PHRASES = 4
SCORED_PHRASES = 8
HELD_SECONDS = 600.0

Metric = Callable[..., float]


def apart(text: str) -> float:
    """A little, for no reason: another text earns another, and no group is without variance."""
    return zlib.crc32(text.encode()) % 97 / 1e4


def letters(example: Any, prediction: Any, trace: Any = None) -> float:
    return distinct_letters(prediction.french) + apart(prediction.french)


def brevity(example: Any, prediction: Any, trace: Any = None) -> float:
    """Better than an answer that does not parse: -1."""
    return -len(prediction.french) / 100 + apart(prediction.french)


def vowels(example: Any, prediction: Any, trace: Any = None) -> float:
    return sum(it in "aeiou" for it in prediction.french) + apart(prediction.french)


def likelihood(example: Any, prediction: Any, trace: Any = None) -> float:
    """The sum of the answer's logprobs, which tells weights apart even where their greedy texts are one."""
    return sum(token.logprob for token in prediction.logprobs.content)


METRICS: dict[str, Metric] = {it.__name__: it for it in (letters, brevity, vowels)}


def held(metric: Metric, step: int, until: Path) -> Metric:
    """The same, but in this step's rollouts it waits for a file."""
    judged = itertools.count(1)

    def waiting(example: Any, prediction: Any, trace: Any = None) -> float:
        if next(judged) == (step - 1) * EXAMPLES * ROLLOUTS + 1:
            wait_until(until.exists, HELD_SECONDS, f"{until.name} is there")
        return metric(example, prediction, trace)

    return waiting


def student(run: Session, **settings: Any) -> dspy.Predict:
    program = dspy.Predict("english -> french")
    program.set_lm(PolicyLM(run, max_tokens=TOKENS, **settings))
    return program


def grpo(metric: Metric, asked: argparse.Namespace) -> GRPO:
    return GRPO(
        metric,
        num_train_steps=asked.steps,
        num_dspy_examples_per_grpo_step=EXAMPLES,
        num_rollouts_per_grpo_step=ROLLOUTS,
        checkpoint="none",
        seed=asked.seed,
    )


def examples(phrases: list[Phrase]) -> list[dspy.Example]:
    return [dspy.Example(english=it.english, french=it.french).with_inputs("english") for it in phrases]


def described(optimizer: GRPO, after_step: int, program: dspy.Module) -> dict[str, Any]:
    """What a training says of itself; `after_step`: where the run was when it began."""
    predictor: Any = program.predictors()[0]
    return {
        "compile": optimizer.summary["compile"],
        "after_step": after_step,
        "steps": optimizer.report.steps,
        "trained": optimizer.report.trained,
        "version": optimizer.summary["version"],
        "model": predictor.lm.model,
    }


def ask(run: Session, model: str) -> list[dict[str, Any]]:
    """Greedy answers of a version by its name, each with the body that anybody can ask again."""
    exchanges = []
    with OpenAI(base_url=run.base_url, api_key=run.api_key) as client:
        for phrase in held_out_phrases(ASKED_PHRASES):
            body: dict[str, Any] = {
                "model": model,
                "messages": messages("english", "french", phrase.english),
                "temperature": 0,
                "max_tokens": TOKENS,
                "logprobs": True,
            }
            choice: Any = client.chat.completions.create(**body).choices[0]
            logprobs = [token.logprob for token in choice.logprobs.content]
            exchanges.append({"body": body, "text": choice.message.content, "logprobs": logprobs})
    return exchanges


def train(run: Session, asked: argparse.Namespace) -> dict[str, Any]:
    metric = METRICS[asked.metric]
    if asked.until:
        metric = held(metric, asked.hold_at, asked.until)
    compiles, exchanges = [], []
    for _ in range(asked.compiles):
        after_step = run.status().step
        optimizer = grpo(metric, asked)
        program = optimizer.compile(student(run), trainset=examples(training_phrases(16, asked.seed)))
        compiles.append(described(optimizer, after_step, program))
        exchanges += ask(run, compiles[-1]["model"])
    return {"compiles": compiles, "exchanges": exchanges}


def train_together(run: Session, asked: argparse.Namespace) -> dict[str, Any]:
    """Prompts, then weights. Scores are of greedy answers.

    `untrained`, `newest`: exchanges with the weights of the candidate that was not trained, and the newest.
    """
    after_step = run.status().step
    held_out = examples(held_out_phrases(SCORED_PHRASES))
    weights = grpo(METRICS[asked.metric], asked)
    prompts = dspy.BootstrapFewShot(metric=letters, max_bootstrapped_demos=1, max_labeled_demos=1)
    with dspy.context(max_errors=1000):  # how many answers do not parse is a matter of chance
        best: Any = dspy.BetterTogether(metric=likelihood, p=prompts, w=weights).compile(
            student(run, temperature=0.0, logprobs=True),
            trainset=examples(training_phrases(16, asked.seed)),
            valset=held_out,
            strategy="p -> w",
        )
    score = dspy.Evaluate(devset=held_out, metric=likelihood, num_threads=4)
    candidates = {it["strategy"]: it for it in best.candidate_programs}
    untrained = candidates[""]["program"].predictors()[0].lm.model
    return {
        "compiles": [described(weights, after_step, candidates["p -> w"]["program"])],
        "candidates": {
            strategy: {"score": it["score"], "again": score(it["program"]).score}
            for strategy, it in candidates.items()
        },
        "untrained": ask(run, untrained),
        "newest": ask(run, run.model),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on a held endpoint.")
    parser.add_argument("metric", choices=METRICS)
    parser.add_argument("seed", type=int)
    parser.add_argument("steps", type=int)
    parser.add_argument("result", type=Path)
    parser.add_argument("--compiles", type=int, default=1)
    parser.add_argument("--together", action="store_true")
    parser.add_argument("--hold-at", type=int, default=1)
    parser.add_argument("--until", type=Path)
    asked = parser.parse_args()
    run = connect()
    found = train_together(run, asked) if asked.together else train(run, asked)
    asked.result.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
