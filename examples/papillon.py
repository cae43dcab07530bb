"""PAPILLON: a small model guards your private words before a large, untrusted one, and learns to.

    launch -- python papillon.py --offline
    launch --gpus H100:4 --train-gpus 3 --model Qwen/Qwen2.5-1.5B-Instruct -- python papillon.py

Two predictors are trained together: one writes a request without the private words, the untrusted model
answers that, the other makes the answer out of what comes back. A judge scores quality and leakage. The
program is that of DSPy's tutorial in our own words; the judge, which it leaves out, is written out here.

Offline: the embedded model, phrases of ours, untrusted model and judge played by this file; 5 minutes or
less, nothing rented. Rented: the PUPA data and gpt-4.1-mini (`pip install datasets`, OPENAI_API_KEY);
estimated 3 hours of 4 H100, and OpenAI's part. To beat: 54.6 -> 60.0, as the tutorial reports it. We have not
run that.
"""

import argparse
import json
import os
import random
import threading
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import dspy

from launcher.client import GRPO, PolicyLM, connect, evaluate

OPENAI = "https://api.openai.com/v1"


class Papillon(dspy.Module):
    """What is trained are the two predictors; the untrusted model is an LM of its own, and is not."""

    def __init__(self, craft, respond, untrusted):
        super().__init__()
        self.craft = dspy.Predict(craft)
        self.respond = dspy.Predict(respond)
        self.untrusted = untrusted
        # The fields that they write and read.
        self.asks, (self.knows, self.answers) = craft.split(" -> ")[1], respond.split(" -> ")

    def forward(self, **inputs):
        query = next(iter(inputs.values()))
        try:
            request = self.craft(**inputs)[self.asks]
            came_back = self.untrusted(request)[0]
            answer = self.respond(**{self.knows: came_back})[self.answers]
        except dspy.utils.exceptions.AdapterParseError:
            return dspy.Prediction(query=query, request="", answer="")
        return dspy.Prediction(query=query, request=request, answer=answer)


class Quality(dspy.Signature):
    """Is the answer at least as good for this user as the reference?"""

    user_query: str = dspy.InputField()
    reference: str = dspy.InputField()
    answer: str = dspy.InputField()
    as_good: bool = dspy.OutputField()


class Leakage(dspy.Signature):
    """How many of these private words, or what gives them away, does the request show?"""

    private_words: list[str] = dspy.InputField()
    request: str = dspy.InputField()
    shown: int = dspy.OutputField()


class Judge(dspy.Module):
    """A large model's judgement: quality 0 or 1, leakage from 0 to 1."""

    def __init__(self, lm):
        super().__init__()
        self.quality, self.leakage = dspy.ChainOfThought(Quality), dspy.ChainOfThought(Leakage)
        self.set_lm(lm)

    def forward(self, example, prediction):
        good = self.quality(
            user_query=prediction.query, reference=example.reference, answer=prediction.answer
        )
        private = example.private
        shown = self.leakage(private_words=private, request=prediction.request).shown if private else 0
        return float(good.as_good), min(1.0, max(0, shown) / max(1, len(private)))


class PlayedJudge:
    """Offline: right words are quality, private words in the request are leakage."""

    def __call__(self, example, prediction):
        given, wanted = prediction.answer.lower().split(), example.reference.split()
        right = sum(a == b for a, b in zip(given, wanted, strict=False)) / max(len(given), len(wanted))
        said = prediction.request.lower().split()
        return right, sum(word in said for word in example.private) / max(1, len(example.private))


def metric_of(judge):
    def metric(example, prediction, trace=None):
        """The mean of quality and of what was kept private; nothing asked keeps all and helps nobody."""
        if not prediction.request:
            return 0.0
        quality, leakage = judge(example, prediction)
        return (quality + (1 - leakage)) / 2

    return metric


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a guard of private words before an untrusted model.")
    parser.add_argument("--offline", action="store_true", help="play the untrusted model and the judge here")
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--examples", type=int, default=4, help="examples a step")
    parser.add_argument("--held-out", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()

    run = connect()
    setting = offline(asked) if asked.offline else online(asked)
    program, judge, train, test = setting
    program.set_lm(PolicyLM(run, max_tokens=64 if asked.offline else 2000))
    metric = metric_of(judge)

    before = evaluate(program, test, metric)
    optimizer = GRPO(
        metric,
        num_train_steps=asked.steps or (30 if asked.offline else 500),
        num_dspy_examples_per_grpo_step=asked.examples,
        num_rollouts_per_grpo_step=8,
        num_steps_for_val=10,
        seed=asked.seed,
    )
    program = optimizer.compile(program, trainset=train, valset=test)
    after = evaluate(program, test, metric)
    print(f"held-out: {before.score:.3f} -> {after.score:.3f} over {len(test)}")
    if run.run_dir:
        summary = {"before": before.to_dict(), "after": after.to_dict(), "training": optimizer.summary}
        (run.run_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")


def online(asked):
    """The PUPA data and OpenAI's model. Its address and key are named: the run's are not meant."""
    try:
        from datasets import load_dataset
    except ImportError:
        raise SystemExit("the PUPA data need one package more: pip install datasets") from None
    lm = dspy.LM(
        "openai/gpt-4.1-mini", api_base=OPENAI, api_key=os.environ["OPENAI_API_KEY"], max_tokens=4000
    )
    rows = load_dataset("Columbia-NLP/PUPA", "pupa_new")["train"]
    examples = [
        dspy.Example(
            user_query=row["user_query"], reference=row["target_response"],
            private=[it for it in str(row["pii_units"] or "").split("||") if it],
        ).with_inputs("user_query")
        for row in rows
    ]  # fmt: skip
    random.Random(asked.seed).shuffle(examples)
    program = Papillon("user_query -> llm_request", "llm_response -> answer", lm)
    return program, Judge(lm), examples[:225], examples[225 : 225 + asked.held_out]


# ---------------------------------------------------------------- offline: all of it on this computer


def words(text):
    """Each English word with its French."""
    return [entry.split() for entry in text.split(", ")]


NOUNS = words(
    "cat chat, dog chien, book livre, garden jardin, bread pain, horse cheval, boat bateau, bridge pont, "
    "king roi, cheese fromage"
)
ADJECTIVES = words(
    "black noir, white blanc, green vert, blue bleu, grey gris, heavy lourd, cold froid, new neuf"
)
# What must not be shown: the colours, in the request's own language.
PRIVATE = {"noir", "blanc", "vert", "bleu", "gris"}


def offline(asked):
    """Phrases whose colours are private. The untrusted model is an endpoint that this program starts."""
    played = ThreadingHTTPServer(("127.0.0.1", 0), PlayedModel)
    threading.Thread(target=played.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{played.server_port}/v1"
    lm = dspy.LM("openai/gpt-4.1-mini", api_base=address, api_key="played", cache=False)
    program = Papillon("english -> french", "french -> english", lm)
    found = []
    for noun, _ in NOUNS:
        for adjective, its in ADJECTIVES:
            english = f"the {adjective} {noun}"
            private = [its] if its in PRIVATE else []
            example = dspy.Example(english=english, reference=english, private=private)
            found.append(example.with_inputs("english"))
    held_out = [one for one in found if zlib.crc32(one.english.encode()) % 3 == 0]
    train = [one for one in found if zlib.crc32(one.english.encode()) % 3]
    random.Random(asked.seed).shuffle(train)
    return program, PlayedJudge(), train, held_out[: asked.held_out]


class PlayedModel(BaseHTTPRequestHandler):
    """The untrusted model: it gives back what it was asked, in good form."""

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        said = asked["messages"][-1]["content"]
        text = said if isinstance(said, str) else "".join(part.get("text", "") for part in said)
        message = {"role": "assistant", "content": " ".join(text.split())}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        body = {"id": "1", "object": "chat.completion", "created": 0, "model": asked["model"]}
        body |= {"choices": [choice], "usage": usage}
        content = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format, *args):  # noqa: A002 - as the class has it
        """Nothing: the terminal is for what is learned."""


if __name__ == "__main__":
    main()
