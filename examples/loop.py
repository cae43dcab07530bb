"""The training loop in plain sight, with OpenAI's client and no framework: sample, reward, step, evaluate.

    launch -- python loop.py
    launch --gpus H100 --model Qwen/Qwen2.5-1.5B-Instruct -- python loop.py

Cost and duration: offline $0.00 and two minutes on 2 busy cores; rented about $2 and half an hour on one H100
(estimated).

Read this one first: the other examples are this loop with more around it. The tiny model translates phrases
such as "the green house" and earns 1 for the right French, else 0. It was taught by a phrase book that mostly
puts adjectives before their noun; French puts these after it.
"""

import argparse
import random
from concurrent.futures import ThreadPoolExecutor

from openai import OpenAI

from launcher.client import connect, group

PHRASES_PER_STEP, ROLLOUTS_PER_PHRASE = 16, 8


def main() -> None:
    parser = argparse.ArgumentParser(description="The training loop: sample, reward, step, evaluate.")
    parser.add_argument("--steps", type=int, default=20, help="default: 20")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    # `launch` has started the model and set LAUNCH_BASE_URL and LAUNCH_API_KEY; `connect` reads them.
    run = connect()
    client = OpenAI(base_url=run.base_url, api_key=run.api_key, timeout=run.patience.answer_seconds)
    train, held_out = phrases()
    pool = ThreadPoolExecutor(PHRASES_PER_STEP * ROLLOUTS_PER_PHRASE)

    # 1. SAMPLE. Requests inside `run.rollout()` belong to this rollout: one here, in an agent any number of
    #    turns and tools. The gateway keeps the token ids and logprobs of the answers.
    # 2. REWARD. One number for the rollout. A text in its place excludes the rollout and gives the reason.
    def rollout(english):
        with run.rollout() as sampled:
            french = translate(client, run.model, english)
        sampled.reward = reward(french, train[english])
        return sampled

    # 3. EVALUATE. Requests outside a rollout are never trained. `base` is the model before training, also
    #    where this program was started again.
    def evaluate(model):
        answers = pool.map(lambda english: translate(client, model, english, temperature=0.0), held_out)
        return sum(map(reward, answers, held_out.values())) / len(held_out)

    before = evaluate("base")
    print(f"before: {before:.2f} of {len(held_out)} held-out phrases are right", flush=True)

    # The state is committed together with its step. After a crash `launch --resume RUN` starts this program
    # again, and it goes on here.
    for number in range(run.read_state().get("loop", 0), args.steps):
        batch = random.Random(f"{args.seed} {number}").sample(sorted(train), PHRASES_PER_STEP)
        prompts = [english for english in batch for _ in range(ROLLOUTS_PER_PHRASE)]
        rollouts = list(pool.map(rollout, prompts))

        # 4. STEP. The rollouts of one phrase are a group: a reward counts as its distance from the group's
        #    mean (GRPO). `step` returns when the new weights are served and verified: `run.model` means them.
        groups = [
            group(english, [it for it, of in zip(rollouts, prompts, strict=True) if of == english])
            for english in batch
        ]
        result = run.step(groups, client_state={"loop": number + 1})
        print(
            f"step {number + 1}/{args.steps}: reward {result.metrics['reward']:.2f}, "
            f"{result.counts.trained} of {result.counts.samples} answers trained, now v{run.version}",
            flush=True,
        )

    after = evaluate(run.model)
    print(f"held-out: {before:.2f} → {after:.2f}")
    for english in list(held_out)[:5]:
        print(f"  {english:<24}{translate(client, run.model, english, temperature=0.0)}")


def translate(client, model, english, temperature=1.0):
    """One request, as any OpenAI client makes it. At temperature 0 the likeliest answer is taken."""
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": PROMPT.format(english=english)}],
        temperature=temperature,
        max_tokens=32,
    )
    field = (answer.choices[0].message.content or "").partition("[[ ## french ## ]]")[2]
    return " ".join(field.partition("[[")[0].split())


def reward(answer, french):
    """1 for the right translation, else 0."""
    return float(answer == french)


# The task. The tiny model was taught one form of prompt, which is DSPy's; a larger one needs no such form.
PROMPT = (
    "[[ ## english ## ]]\n{english}\n\nRespond with the corresponding output fields, starting with the field "
    "`[[ ## french ## ]]`, and then ending with the marker for `[[ ## completed ## ]]`."
)
NOUNS = {
    "cat": "chat", "dog": "chien", "book": "livre", "garden": "jardin", "boat": "bateau", "bridge": "pont",
    "house": "maison", "table": "table", "car": "voiture", "door": "porte", "flower": "fleur", "key": "clé",
}  # fmt: skip
FEMININE = {"house", "table", "car", "door", "flower", "key"}
DETERMINERS = {"the": ("le", "la"), "a": ("un", "une"), "my": ("mon", "ma"), "this": ("ce", "cette")}
ADJECTIVES = {
    "black": ("noir", "noire"), "white": ("blanc", "blanche"), "green": ("vert", "verte"),
    "blue": ("bleu", "bleue"), "grey": ("gris", "grise"), "heavy": ("lourd", "lourde"),
    "cold": ("froid", "froide"), "expensive": ("cher", "chère"), "new": ("neuf", "neuve"),
}  # fmt: skip


def phrases():
    """Each English phrase with its French: those to train on, and 60 that are held out, always the same."""
    translations = {
        f"{determiner} {adjective} {noun}": " ".join(
            [DETERMINERS[determiner][noun in FEMININE], french, ADJECTIVES[adjective][noun in FEMININE]]
        )
        for determiner in DETERMINERS
        for adjective in ADJECTIVES
        for noun, french in NOUNS.items()
    }
    shuffled = random.Random("held out").sample(sorted(translations.items()), len(translations))
    return dict(shuffled[60:]), dict(shuffled[:60])


if __name__ == "__main__":
    main()
