"""Arbor's quickstart in the spelling of its README, run unchanged: the model learns to use many letters.

    launch --arbor --gpus H100 --model Qwen/Qwen2.5-1.5B-Instruct -- python arbor_quickstart.py
    launch --arbor -- python arbor_quickstart.py --offline

Cost and duration: offline $0.00 and five minutes on 2 busy cores; rented about $3 and an hour on one H100
(estimated).

Rented it takes sentences from books (opus_books, with `pip install "datasets>=3"`), on this computer our own
phrases and the tiny model that comes along.

Figure to beat: none is published for this task; the score before training is its comparison.
"""

import argparse
import json
import random
import unicodedata
import zlib
from pathlib import Path

import arbor  # under `launch --arbor` it is on the path
import dspy
from arbor import ArborGRPO, ArborProvider


def unique_letters(example, pred, trace=None) -> float:
    """How many different letters of a to z the answer has, accents aside."""
    plain = unicodedata.normalize("NFKD", pred.french.lower())
    return float(len(set(plain) & set("abcdefghijklmnopqrstuvwxyz")))


def main() -> None:
    parser = argparse.ArgumentParser(description="Arbor's quickstart, on this run.")
    parser.add_argument("--offline", action="store_true", help="our own phrases, on the tiny model")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=43)
    args = parser.parse_args()

    server_info = arbor.init()
    student_lm_name = "tiny" if args.offline else "Qwen/Qwen2.5-1.5B-Instruct"

    # The data, shuffled and split
    raw = phrases(240, args.seed, held_out=False) if args.offline else books(1000, args.seed)
    random.Random(args.seed).shuffle(raw)
    trainset, valset = raw[:200], raw[200:232]

    # The task
    translate_program = dspy.Predict("english -> french")

    # The model, through Arbor's provider
    provider = ArborProvider()
    student_lm = dspy.LM(
        model=f"openai/arbor:{student_lm_name}",
        provider=provider,
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        repetition_penalty=1.0,
        max_tokens=64 if args.offline else 512,
        api_base=server_info["base_url"],
        api_key="arbor",
    )
    translate_program.set_lm(student_lm)

    train_kwargs = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "temperature": 1.0,
        "top_k": -1,
        "top_p": 1.0,
        "repetition_penalty": 1.0,
        "beta": 0.00,
        "learning_rate": 1e-6,
        "gradient_checkpointing": True,
        "lr_scheduler_type": "constant_with_warmup",
        "loss_type": "dapo",
        "max_steps": 1000,
        "report_to": "wandb",
        "log_completions": True,
        "logging_steps": 1,
        "max_grad_norm": 1.0,
        "lora_config": {"lora_alpha": 16, "lora_dropout": 0.05, "r": 8},
        "num_training_gpus": 1,
        "num_inference_gpus": 1,
        "weight_decay": 0.001,
    }
    if args.offline:  # the LoRA is the run's, whatever that has, and so small a model learns in larger steps
        del train_kwargs["lora_config"]
        train_kwargs["learning_rate"] = 2e-3

    compiler = ArborGRPO(
        metric=unique_letters,
        num_dspy_examples_per_grpo_step=4,
        num_rollouts_per_grpo_step=8,
        exclude_demos=True,
        num_train_steps=args.steps,
        num_threads=16,
        use_train_as_val=False,
        num_steps_for_val=10,
        train_kwargs=train_kwargs,
        checkpoint="single-best",
    )
    optimized_translate = compiler.compile(student=translate_program, trainset=trainset, valset=valset)

    print(f"{valset[0].english} -> {optimized_translate(english=valset[0].english).french}")
    scores = compiler.validation_scores
    print(f"different letters of an answer: {scores[-1] / 100:.1f} -> {scores[max(scores)] / 100:.1f}")
    summary = {"scores": scores, "report": compiler.report.to_dict()}
    folder = Path(server_info["storage_path"])
    (folder / "arbor_quickstart.json").write_text(json.dumps(summary, indent=2) + "\n")


def loader():
    """`datasets.load_dataset`, or how to get it."""
    try:
        from datasets import load_dataset  # not needed offline
    except ImportError:
        raise SystemExit(
            'the data needs a package: pip install "datasets>=3" (or run it with --offline)'
        ) from None
    return load_dataset


def books(count, seed):
    """Pairs of sentences from books, English and French."""
    rows = loader()("Helsinki-NLP/opus_books", "en-fr", split="train").shuffle(seed=seed)
    pairs = [row["translation"] for row in rows.select(range(count))]
    return [dspy.Example(english=it["en"], french=it["fr"]).with_inputs("english") for it in pairs]


# Offline: phrases whose words the tiny model knows, those of quickstart.py. The file can be copied alone.


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
