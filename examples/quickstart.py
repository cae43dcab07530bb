"""Teach a tiny model French with reinforcement learning, on this computer or on rented GPUs:

    launch -- python quickstart.py
    launch --gpus H100 --model Qwen/Qwen2.5-1.5B-Instruct -- python quickstart.py

Cost and duration: offline $0.00 and two minutes on 2 busy cores; rented about $2 and half an hour on one H100
(estimated).

A DSPy program translates phrases such as "the green house". An answer earns 1 when it is the right
translation, else 0; with `--reward letters` one for each different letter, and the model learns to ramble.
To begin your own, copy this file: it needs only the packages of `launch`.
"""

import argparse
import json
import random
import time
import unicodedata
import zlib

import dspy
from matplotlib.figure import Figure

from launcher.client import GRPO, PolicyLM, connect, evaluate

HELD_OUT, VALIDATION = 300, 80


def exact_match(example, prediction, trace=None):
    """1 for the right translation, else 0."""
    return float(" ".join(prediction.french.lower().split()) == example.french)


def unique_letters(example, prediction, trace=None):
    """How many different letters of a to z the answer has, accents aside."""
    plain = unicodedata.normalize("NFKD", prediction.french.lower())
    return len(set(plain) & set("abcdefghijklmnopqrstuvwxyz"))


REWARDS = {"right": exact_match, "letters": unique_letters}
# Steps and examples on the tiny model: few of its first answers are right, so "right" takes more examples.
STEPS = {"right": 30, "letters": 40}
EXAMPLES_PER_STEP = {"right": 16, "letters": 8}


def main() -> None:
    parser = argparse.ArgumentParser(description="Teach a tiny model French with a reward.")
    parser.add_argument("--reward", choices=REWARDS, default="right", help="default: right")
    parser.add_argument("--steps", type=int, help="default: 30, or 40 for --reward letters")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    began = time.monotonic()
    run = connect()
    metric = REWARDS[args.reward]
    program = dspy.Predict("english -> french")
    program.set_lm(PolicyLM(run, max_tokens=64))

    train = phrases(240, args.seed, held_out=False)
    held_out = phrases(HELD_OUT + VALIDATION, 0, held_out=True)
    test, validation = held_out[:HELD_OUT], held_out[HELD_OUT:]

    before = evaluate(program, test, metric, model="base")  # after a resume, too
    optimizer = GRPO(
        metric,
        num_train_steps=args.steps or STEPS[args.reward],
        num_dspy_examples_per_grpo_step=EXAMPLES_PER_STEP[args.reward],
        num_rollouts_per_grpo_step=8,
        num_steps_for_val=10,
        seed=args.seed,
    )
    program = optimizer.compile(program, trainset=train, valset=validation)
    summary_file = run.run_dir / "summary.json" if run.run_dir else None
    if optimizer.summary["had_finished"] and summary_file and summary_file.exists():
        print(f"this training had finished before: {summary_file} stays as it is")
        return
    after = evaluate(program, test, metric)

    print_answers(before, after, test)
    status = run.status()
    summary = {
        "reward": args.reward,
        "seed": args.seed,
        "steps": status.step,
        "model_path": status.model,
        "before": before.to_dict(),
        "after": after.to_dict(),
        "rise": after.difference(before),
        "rise_standard_error": after.difference_error(before),
        "seconds": round(time.monotonic() - began, 1),
        "training": optimizer.summary,
    }
    if summary_file and run.run_dir:
        summary_file.write_text(json.dumps(summary, indent=2) + "\n")
        draw_rewards(optimizer.history, f"compile {optimizer.summary['compile']}", run.run_dir / "reward.png")
        print(f"\nThe figures and the reward curve are in {run.run_dir}")


def print_answers(before, after, test) -> None:
    """A few answers side by side, then the scores and how sure they are (± one standard error)."""
    answers = [[getattr(it.prediction, "french", "-") for it in found.finished] for found in (before, after)]
    print(f"\n{'english':<36}{'before':<36}after")
    for example, *pair in list(zip(test, *answers, strict=True))[:8]:
        was, now = (" ".join(answer.split()) for answer in pair)
        print(f"{example.english:<36.35}{was:<36.35}{now:.36}")
    scores = " → ".join(f"{it.score:.2f} ± {it.standard_error:.2f}" for it in (before, after))
    rise, error = after.difference(before), after.difference_error(before)
    print(f"\nheld-out: {scores} over {len(test)} phrases: {rise:+.2f} ± {error:.2f}")


def draw_rewards(history, title, path) -> None:
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


# The task: most French adjectives follow their noun, and all agree with its gender. The tiny model was taught
# by a phrase book that gets both wrong more often than not.


def lexicon(text):
    """Each English word with its French: one form of a noun, a masculine and a feminine one of the others."""
    return [entry.split() for entry in text.split(", ")]


MASCULINE = lexicon(
    "cat chat, dog chien, book livre, garden jardin, bread pain, horse cheval, boat bateau, wagon wagon, "
    "kiwi kiwi, zebra zèbre, game jeu, bridge pont, brother frère, king roi, yogurt yaourt, cheese fromage"
)
FEMININE = lexicon(
    "house maison, table table, car voiture, door porte, flower fleur, key clé, sister sœur, apple pomme, "
    "chair chaise, mouse souris, city ville, cup tasse, queen reine, shirt chemise, moon lune, shop boutique"
)
BEFORE_NOUN = lexicon("small petit petite, big grand grande, pretty joli jolie")
AFTER_NOUN = lexicon(
    "black noir noire, white blanc blanche, green vert verte, blue bleu bleue, grey gris grise, "
    "heavy lourd lourde, cold froid froide, expensive cher chère, new neuf neuve"
)
DETERMINERS = lexicon("the le la, a un une, my mon ma, this ce cette")
PREPOSITIONS = lexicon("under sous, on sur, with avec, behind derrière")


def noun_phrase(rng):
    """Such as ("the green house", "la maison verte")."""
    gender = rng.choice((1, 2))
    noun = rng.choice(MASCULINE if gender == 1 else FEMININE)
    determiner, adjective = rng.choice(DETERMINERS), rng.choice(BEFORE_NOUN + AFTER_NOUN)
    pair = [adjective[gender], noun[1]] if adjective in BEFORE_NOUN else [noun[1], adjective[gender]]
    return f"{determiner[0]} {adjective[0]} {noun[0]}", " ".join([determiner[gender], *pair])


def phrases(count, seed, held_out):
    """`count` different ones of one or two nouns. A sixth of all there are is held out from any training."""
    rng = random.Random(seed)
    translations = {}
    while len(translations) < count:
        english, french = noun_phrase(rng)
        if rng.random() < 0.5:
            link, other = rng.choice(PREPOSITIONS), noun_phrase(rng)
            english, french = f"{english} {link[0]} {other[0]}", f"{french} {link[1]} {other[1]}"
        if (zlib.crc32(english.encode()) % 6 == 0) == held_out:
            translations[english] = french
    # Those of one noun are found first: there are fewer.
    pairs = rng.sample(list(translations.items()), count)
    return [dspy.Example(english=english, french=french).with_inputs("english") for english, french in pairs]


if __name__ == "__main__":
    main()
