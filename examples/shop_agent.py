"""A shop's assistant that learns to call its tools: look up a price, multiply, answer.

    launch --model tiny-agent -- python shop_agent.py
    launch --gpus H100 --model Qwen/Qwen2.5-1.5B-Instruct -- python shop_agent.py

Cost and duration: offline $0.00 and five minutes on 2 busy cores; rented about $2 and half an hour on one
H100 (estimated).

A customer asks what three lamps cost. The agent has a price list and a calculator, as `tools` of OpenAI's
SDK; each call and its answer is a turn of the conversation, and all turns of a conversation are trained
together. The reward is 1 for the right total, else 0: nobody tells the model which tool to call, or when.

Neighbours: `loop.py` is the same loop without tools, `email_search.py` has more tools and longer episodes.
"""

import argparse
import json
import random
from concurrent.futures import ThreadPoolExecutor

from openai import OpenAI

from launcher.client import connect, group

QUESTIONS_PER_STEP, ROLLOUTS_PER_QUESTION = 8, 8
HELD_OUT = 60
MAX_TURNS = 4

PRICES = {
    "lamp": 12, "chair": 25, "table": 48, "bottle": 3, "shirt": 18, "phone": 39, "bicycle": 45, "cup": 4,
    "guitar": 50, "clock": 21, "mirror": 33, "pen": 2, "blanket": 27, "camera": 41, "hat": 16, "vase": 19,
}  # fmt: skip
COUNTS = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {argument: {"type": "string"}},
                "required": [argument],
            },
        },
    }
    for name, argument, description in (
        ("price_of", "item", "Returns the price of an item in euros."),
        ("calculator", "expression", "Computes an expression such as 3 * 4."),
    )
]


def main() -> None:
    parser = argparse.ArgumentParser(description="An agent learns to call its tools.")
    parser.add_argument("--steps", type=int, default=15, help="default: 15")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    run = connect()
    client = OpenAI(base_url=run.base_url, api_key=run.api_key, timeout=run.patience.answer_seconds)
    train, held_out = questions()
    pool = ThreadPoolExecutor(QUESTIONS_PER_STEP * ROLLOUTS_PER_QUESTION)

    def rollout(question):
        with run.rollout() as sampled:
            answer, _ = converse(client, run.model, question)
        sampled.reward = float(answer == train[question])
        return sampled

    def evaluate(model):
        """The shares of held-out questions that are answered rightly, and with the price list."""
        done = list(pool.map(lambda question: converse(client, model, question, temperature=0.0), held_out))
        right = sum(answer == total for (answer, _), total in zip(done, held_out.values(), strict=True))
        return right / len(held_out), sum("price_of" in called for _, called in done) / len(held_out)

    before, called = evaluate("base")
    print(f"before: {before:.2f} of {len(held_out)} answers are right; looked up in {called:.2f}", flush=True)
    for number in range(run.read_state().get("steps", 0), args.steps):
        batch = random.Random(f"{args.seed} {number}").sample(sorted(train), QUESTIONS_PER_STEP)
        asked = [question for question in batch for _ in range(ROLLOUTS_PER_QUESTION)]
        rollouts = list(pool.map(rollout, asked))
        groups = [
            group(question, [it for it, of in zip(rollouts, asked, strict=True) if of == question])
            for question in batch
        ]
        result = run.step(groups, client_state={"steps": number + 1})
        print(
            f"step {number + 1}/{args.steps}: reward {result.metrics['reward']:.2f}, "
            f"{result.counts.trained} of {result.counts.samples} answers trained, now v{run.version}",
            flush=True,
        )
    after, called = evaluate(run.model)
    print(f"held-out: {before:.2f} → {after:.2f}; looked up in {called:.2f}")


def converse(client, model, question, temperature=1.0):
    """The conversation on one question: the last answer, and the names of the tools that were called."""
    messages, called = [{"role": "user", "content": question}], []
    for _ in range(MAX_TURNS):
        answer = client.chat.completions.create(
            model=model, messages=messages, tools=TOOLS, temperature=temperature, max_tokens=64
        )
        message = answer.choices[0].message
        if not message.tool_calls:
            return (message.content or "").strip(), called
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            called.append(call.function.name)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": answer_of(call.function)})
    return "", called


def answer_of(function):
    """What the tool says to a call; of a wrong one, what is wrong."""
    try:
        arguments = json.loads(function.arguments)
        if function.name == "price_of":
            return str(PRICES[arguments["item"]])
        first, sign, second = arguments["expression"].split()
        return str({"+": int.__add__, "-": int.__sub__, "*": int.__mul__}[sign](int(first), int(second)))
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        return f"error: {error}"


def questions():
    """Each question with its answer: those to train on, and those that are held out, always the same."""
    forms = (
        "What do {count} {item}s cost?",
        "How much are {count} {item}s?",
        "I buy {count} {item}s. How much is it?",
    )
    totals = {
        form.format(count=word, item=item): str(count * price)
        for form in forms
        for word, count in COUNTS.items()
        for item, price in PRICES.items()
    }
    shuffled = random.Random("held out").sample(sorted(totals.items()), len(totals))
    return dict(shuffled[HELD_OUT:]), dict(shuffled[:HELD_OUT])


if __name__ == "__main__":
    main()
