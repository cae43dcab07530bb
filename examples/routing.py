"""Route a customer's message to a team: a small real model, on this computer.

    launch --model HuggingFaceTB/SmolLM2-135M-Instruct --set train.learning_rate=5e-5 \\
        --set train.overlong=keep -- python routing.py
    launch --gpus H100 --model Qwen/Qwen2.5-1.5B-Instruct -- python routing.py

Cost and duration: offline $0.00 and ten minutes on 2 busy cores; rented about $2 and half an hour on one
H100 (estimated).

The step between the tiny models that come with `launch` and a rented GPU: a model that has read the web, and
is small enough for a laptop. One example of each team stands before the question, as turns of the chat. The
reward is 1 if the answer's first word is the right team, else 0. Such a model goes on talking, so an answer
is cut off after twelve tokens and trained all the same (`train.overlong=keep`). Printed at the end: the
held-out score with its standard error, and the share of the answer that is given most often, which is near 1
where a model has stopped looking.
"""

import argparse
import itertools
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from openai import OpenAI

from launcher.client import connect, group

MESSAGES_PER_STEP, ROLLOUTS_PER_MESSAGE = 8, 8
HELD_OUT = 64
INSTRUCTIONS = "Sort each message into billing, delivery, returns or account. Answer with one word."
EXAMPLES = {
    "My card was charged twice.": "billing",
    "The parcel never came.": "delivery",
    "I want my money back for these shoes.": "returns",
    "I cannot log in any more.": "account",
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Route messages with a small real model.")
    parser.add_argument("--steps", type=int, default=32, help="default: 32")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    run = connect()
    client = OpenAI(base_url=run.base_url, api_key=run.api_key, timeout=run.patience.answer_seconds)
    train, held_out = messages()
    pool = ThreadPoolExecutor(MESSAGES_PER_STEP * ROLLOUTS_PER_MESSAGE)

    def rollout(message):
        with run.rollout() as sampled:
            answer = route(client, run.model, message)
        sampled.reward = float(answer == train[message])
        return sampled

    def evaluate(model):
        """The share of right answers, its standard error, and the share of the most frequent answer."""
        answers = list(pool.map(lambda message: route(client, model, message, temperature=0.0), held_out))
        right = sum(map(str.__eq__, answers, held_out.values())) / HELD_OUT
        return right, (right * (1 - right) / HELD_OUT) ** 0.5, max(Counter(answers).values()) / HELD_OUT

    before, before_error, most = evaluate("base")
    print(f"before: {before:.3f} ± {before_error:.3f}, most frequent {most:.2f}", flush=True)
    for number in range(run.read_state().get("steps", 0), args.steps):
        batch = random.Random(f"{args.seed} {number}").sample(sorted(train), MESSAGES_PER_STEP)
        asked = [message for message in batch for _ in range(ROLLOUTS_PER_MESSAGE)]
        rollouts = list(pool.map(rollout, asked))
        groups = [
            group(message, [it for it, of in zip(rollouts, asked, strict=True) if of == message])
            for message in batch
        ]
        result = run.step(groups, client_state={"steps": number + 1})
        print(
            f"step {number + 1}/{args.steps}: reward {result.metrics['reward']:.2f}, "
            f"{result.counts.trained} of {result.counts.samples} answers trained",
            flush=True,
        )
    after, after_error, most = evaluate(run.model)
    print(f"held-out: {before:.3f} → {after:.3f} ± {after_error:.3f}, most frequent {most:.2f}")


def route(client, model, message, temperature=1.0):
    """The first word of the answer."""
    conversation = [{"role": "system", "content": INSTRUCTIONS}]
    for example, team in EXAMPLES.items():
        conversation.append({"role": "user", "content": example})
        conversation.append({"role": "assistant", "content": team})
    conversation.append({"role": "user", "content": message})
    answer = client.chat.completions.create(
        model=model, messages=conversation, temperature=temperature, max_tokens=12
    )
    words = (answer.choices[0].message.content or "").lower().split()
    return words[0].strip(".,:;!\"'") if words else ""


FORMS = {
    "billing": (
        "Why is there {} on my invoice?",
        "You took {} that I did not agree to.",
        "Please explain {} of this month.",
        "I was billed for {} by mistake.",
    ),
    "delivery": (
        "{} is two weeks late.",
        "The courier left {} in the rain.",
        "Where is {} that I ordered?",
        "{} went to the wrong address.",
    ),
    "returns": (
        "{} does not fit, how do I send it back?",
        "I want another one instead of {}.",
        "Please take back {}, it is broken.",
        "How can I exchange {}?",
    ),
    "account": (
        "I forgot {} of my profile.",
        "Please change {} that I sign in with.",
        "The site does not accept {}.",
        "How do I update {} in my settings?",
    ),
}
THINGS = {
    "billing": "a second fee, the charge, this amount, a cost, the tax, a payment, the discount, the price",
    "delivery": "my order, the package, the box, my parcel, the letter, the sofa, my new phone, the gift",
    "returns": "the jacket, the lamp, this watch, the toaster, my new chair, the shirt, the bag, the mirror",
    "account": "my password, my e-mail, the user name, my number, the code, my address, the link, my login",
}


def messages():
    """Each message with its team: those to train on, and those that are held out, always the same."""
    made = {}
    for team in FORMS:
        for form, thing in itertools.product(FORMS[team], THINGS[team].split(", ")):
            message = form.format(thing)
            made[message[0].upper() + message[1:]] = team
    shuffled = random.Random("held out").sample(sorted(made.items()), len(made))
    return dict(shuffled[HELD_OUT:]), dict(shuffled[:HELD_OUT])


if __name__ == "__main__":
    main()
