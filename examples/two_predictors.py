"""A program of two predictors, trained together: one to French, one back to English.

    launch -- python two_predictors.py
    launch --gpus H100 --model Qwen/Qwen2.5-1.5B-Instruct -- python two_predictors.py

Cost and duration: offline $0.00 and four minutes on 2 busy cores; rented about $3 and an hour on one H100
(estimated).

Each predictor has a group of its own in every step, and a score of its own: the first for the different
letters in its French, the second for its right words.
"""

import argparse
import json
import random
import unicodedata
import zlib

import dspy
from matplotlib.figure import Figure

from launcher.client import GRPO, PolicyLM, connect, evaluate

ALPHABET = "abcdefghijklmnopqrstuvwxyz"


class TranslateBothWays(dspy.Module):
    def __init__(self):
        super().__init__()
        self.to_french = dspy.Predict("english -> french")
        self.to_english = dspy.Predict("french -> english")

    def forward(self, english, french):
        translated, translated_back = self.to_french(english=english), self.to_english(french=french)
        return dspy.Prediction(french=translated.french, english=translated_back.english)


def metric(example, prediction, trace=None):
    french_score = unique_letters(prediction.french) / len(ALPHABET)
    english_score = word_accuracy(prediction.english, example.english)
    return dspy.Prediction(
        score=(french_score + english_score) / 2,
        predictor_scores={"to_french": french_score, "to_english": english_score},
    )


def unique_letters(answer):
    """How many letters of a to z the answer has, accents aside."""
    return len(set(unicodedata.normalize("NFKD", answer.lower())) & set(ALPHABET))


def word_accuracy(answer, reference):
    """The share of the words that are right and in their place."""
    given, wanted = answer.lower().split(), reference.split()
    return sum(a == b for a, b in zip(given, wanted, strict=False)) / max(len(given), len(wanted))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train two predictors of one program together.")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    run = connect()
    program = TranslateBothWays()
    program.set_lm(PolicyLM(run, max_tokens=64))
    train = phrases(240, args.seed, held_out=False)
    test = phrases(100, 0, held_out=True)

    before = evaluate(program, test, metric, model="base")  # after a resume, too
    optimizer = GRPO(
        metric,
        num_train_steps=args.steps,
        num_dspy_examples_per_grpo_step=8,
        num_rollouts_per_grpo_step=8,
        seed=args.seed,
    )
    program = optimizer.compile(program, trainset=train)
    summary_file = run.run_dir / "summary.json" if run.run_dir else None
    if optimizer.summary["had_finished"] and summary_file and summary_file.exists():
        print(f"this training had finished before: {summary_file} stays as it is")
        return
    after = evaluate(program, test, metric)

    for name, score in after.predictors.items():
        print(f"{name:<8}{before.predictors.get(name, 0.0):.3f} -> {score:.3f}")
    print(f"{'both':<8}{before.score:.3f} -> {after.score:.3f}")
    if summary_file and run.run_dir:
        summary = {"before": before.to_dict(), "after": after.to_dict(), "training": optimizer.summary}
        summary_file.write_text(json.dumps(summary, indent=2) + "\n")
        draw_rewards(optimizer.history, f"compile {optimizer.summary['compile']}", run.run_dir / "reward.png")


def draw_rewards(history, title, path) -> None:
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


# The phrases, those of quickstart.py: this file, too, can be copied alone.


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
    examples = (dspy.Example(english=english, french=french) for english, french in pairs)
    return [example.with_inputs("english", "french") for example in examples]


if __name__ == "__main__":
    main()
