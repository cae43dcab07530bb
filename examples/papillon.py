"""PAPILLON: keep private data at home, and still get the help of a stronger, untrusted model.

    launch --gpus H100 --model Qwen/Qwen2.5-1.5B-Instruct -- python papillon.py
    launch -- python papillon.py --offline

Cost and duration: offline $0.00 and five minutes on 2 busy cores; rented about $15 and three hours on one
H100, gpt-4.1-mini included (estimated).

Two predictors on the policy are trained together. `rewrite` turns a private query into a request that gives
nothing away; an untrusted model answers that; `compose` makes the answer to the query from that model's
answer. The reward is half quality (a judge holds the response against a strong model's, in both orders) and
half privacy (the judge counts the private pieces that the request gives away).

Rented, the untrusted model and the judge are gpt-4.1-mini with your OPENAI_API_KEY (with `--openai-env` that
name is the run's own key: put yours into JUDGE_API_KEY), the data is Columbia-NLP/PUPA (`pip install
"datasets>=3"`). Offline both are played by a small server that this program starts on 127.0.0.1, by rules:
the tiny model writes a phrase in French, the server leaves out each adjective that is not right there, and
the tiny model reads the rest back in English. "my" should not go out: "my green house" may be asked for as
"une maison verte", and the judge scores only the answer's subject.

Offline the score of 100 held-out queries rose from 0.38 to 0.98 and more. Figure to beat: 54.6 → 60.0, of
DSPy's tutorial, which trains it with Arbor in 3 hours on 4 H100.
"""

import argparse
import json
import os
import random
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import dspy

from launcher.client import GRPO, PolicyLM, connect, evaluate

UNTRUSTED = "gpt-4.1-mini"


class Rewrite(dspy.Signature):
    """Write a request for a powerful model that nobody vouches for. It must bring back what the user needs
    and name nothing private: no persons, places, employers, dates or numbers of the user's."""

    user_query = dspy.InputField()
    llm_request = dspy.OutputField()


class Compose(dspy.Signature):
    """Answer the user's query, with what a powerful model said to a request that hides what is private."""

    llm_request = dspy.InputField(desc="what the powerful model was asked")
    llm_response = dspy.InputField(desc="what it said; it may be incomplete")
    user_query = dspy.InputField()
    response = dspy.OutputField(desc="what the user is told")


class Papillon(dspy.Module):
    def __init__(self, untrusted):
        super().__init__()
        self.rewrite, self.compose = self.make_predictors()
        self.untrusted = untrusted  # a plain LM, no predictor: never trained

    def make_predictors(self) -> tuple[dspy.Module, dspy.Module]:
        return dspy.ChainOfThought(Rewrite), dspy.Predict(Compose)

    def forward(self, user_query):
        try:
            request = self.write_request(user_query)
            untrusted_response = self.untrusted(request)[0]
            response = self.write_response(user_query, request, untrusted_response)
        except Exception:  # noqa: BLE001 - as the original: what fails has said nothing, which the judge then sees
            return dspy.Prediction(llm_request="", llm_response="", response="")
        return dspy.Prediction(llm_request=request, llm_response=untrusted_response, response=response)

    def write_request(self, user_query):
        return self.rewrite(user_query=user_query).llm_request

    def write_response(self, user_query, request, untrusted_response):
        return self.compose(
            llm_request=request, llm_response=untrusted_response, user_query=user_query
        ).response


class TinyPapillon(Papillon):
    """The same for the tiny model, which knows these two signatures and no others."""

    def make_predictors(self) -> tuple[dspy.Module, dspy.Module]:
        return dspy.Predict("english -> french"), dspy.Predict("french -> english")

    def write_request(self, user_query):
        return self.rewrite(english=user_query).french

    def write_response(self, user_query, request, untrusted_response):
        return self.compose(french=untrusted_response).english


class AtLeastAsGood(dspy.Signature):
    """Say whether response A helps the user at least as much as response B."""

    user_query: str = dspy.InputField()
    response_a: str = dspy.InputField()
    response_b: str = dspy.InputField()
    at_least_as_good: bool = dspy.OutputField()


class Leaked(dspy.Signature):
    """Count how many of the private pieces the request gives away."""

    private_pieces: list[str] = dspy.InputField()
    llm_request: str = dspy.InputField()
    pieces_given_away: int = dspy.OutputField()


class Judge(dspy.Module):
    def __init__(self, lm):
        super().__init__()
        self.compare, self.count = dspy.Predict(AtLeastAsGood), dspy.Predict(Leaked)
        self.set_lm(lm)

    def forward(self, user_query, new, old, request, pieces):
        first = self.better(user_query, new, old)
        second = self.better(user_query, old, new)  # a judge prefers what it reads first, or last
        quality = first or first == second
        given_away = self.count(private_pieces=pieces, llm_request=request).pieces_given_away
        return dspy.Prediction(quality=float(quality), leakage=min(1.0, given_away / len(pieces)))

    def better(self, user_query, a, b):
        return self.compare(user_query=user_query, response_a=a, response_b=b).at_least_as_good


def make_metric(judge):
    def overall(example, prediction, trace=None):
        if not prediction.llm_request:
            return 0.0  # nothing was asked: silence is private, but worth nothing
        found = judge(
            user_query=example.user_query,
            new=prediction.response,
            old=example.target_response,
            request=prediction.llm_request,
            pieces=example.pieces,
        )
        score = (found.quality + 1 - found.leakage) / 2
        return score if trace is None else score >= 1

    return overall


def main() -> None:
    parser = argparse.ArgumentParser(description="PAPILLON: two predictors, an untrusted model and a judge.")
    parser.add_argument(
        "--offline", action="store_true", help="our own data and stand-ins, on the tiny model"
    )
    parser.add_argument("--steps", type=int, help="default: 40, or 15 with --offline")
    parser.add_argument("--held-out", type=int, default=100, help="examples to judge with; default: 100")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    run = connect()
    if args.offline:
        offline_server = OfflineServer()
        address, key = offline_server.address, "offline"
        train, test = phrases(150, args.held_out, args.seed)
        steps, examples_per_step = args.steps or 15, 8  # few of the tiny model's first answers are good
    else:
        offline_server = None
        address, key = "https://api.openai.com/v1", own_key()
        train, test = load_pupa(args.held_out)
        steps, examples_per_step = args.steps or 40, 4
    # An address of its own: with `launch --openai-env` OPENAI_BASE_URL would send it to the policy.
    outside_lm = dspy.LM(f"openai/{UNTRUSTED}", api_base=address, api_key=key, max_tokens=2000)
    program = (TinyPapillon if args.offline else Papillon)(outside_lm)
    program.set_lm(PolicyLM(run, max_tokens=64 if args.offline else 1024))
    metric = make_metric(Judge(outside_lm))

    before = evaluate(program, test, metric, model="base")  # after a resume, too
    optimizer = GRPO(
        metric,
        num_train_steps=steps,
        num_dspy_examples_per_grpo_step=examples_per_step,
        num_rollouts_per_grpo_step=8,
        seed=args.seed,
    )
    program = optimizer.compile(program, trainset=train)
    summary_file = run.run_dir / "papillon.json" if run.run_dir else None
    if optimizer.summary["had_finished"] and summary_file and summary_file.exists():
        print(f"this training had finished before: {summary_file} stays as it is")
        return
    after = evaluate(program, test, metric)

    report = optimizer.report
    scores = " → ".join(f"{it.score:.3f} ± {it.standard_error:.3f}" for it in (before, after))
    rise, error = after.difference(before), after.difference_error(before)
    print(f"held-out: {scores} over {len(test)} queries: {rise:+.3f} ± {error:.3f}")
    if rise <= 2 * error:
        print("that is no rise that could be told from chance")
    print(f"groups {report.groups}, without variance {report.groups_without_variance}")
    print(f"answers {report.samples}: trained {report.trained}, dropped {dict(report.dropped)}")
    if summary_file:
        summary = {
            "before": before.to_dict(),
            "after": after.to_dict(),
            "report": report.to_dict(),
            "predictors": sorted(optimizer.history[0]["rewards"]),
            "asked_outside": offline_server.request_count if offline_server else None,
        }
        summary_file.write_text(json.dumps(summary, indent=2) + "\n")


def own_key():
    """Your OpenAI key, which is never sent to the run, nor the run's to OpenAI."""
    key = os.environ.get("JUDGE_API_KEY")
    if not key and not os.environ.get("OPENAI_BASE_URL"):
        key = os.environ.get("OPENAI_API_KEY")
    if not key:
        raise SystemExit(
            "the untrusted model and the judge need a key: export JUDGE_API_KEY=... (or --offline)"
        )
    return key


def load_pupa(held_out):
    rows = list(loader()("Columbia-NLP/PUPA", "pupa_new", split="train"))
    examples = [
        dspy.Example(
            user_query=row["user_query"],
            target_response=row["target_response"],
            pieces=row["pii_units"].split("||"),
        ).with_inputs("user_query")
        for row in rows
        if row["pii_units"]
    ]
    return examples[:225], examples[225 : 225 + held_out]


# Offline: private queries of words that the tiny model knows, and rules in place of the two models.

MASCULINE = {
    "cat": "chat", "dog": "chien", "book": "livre", "garden": "jardin", "bread": "pain", "horse": "cheval",
    "boat": "bateau", "wagon": "wagon", "kiwi": "kiwi", "zebra": "zèbre", "game": "jeu", "bridge": "pont",
    "brother": "frère", "king": "roi", "yogurt": "yaourt", "cheese": "fromage",
}  # fmt: skip
FEMININE = {
    "house": "maison", "table": "table", "car": "voiture", "door": "porte", "flower": "fleur", "key": "clé",
    "sister": "sœur", "apple": "pomme", "chair": "chaise", "mouse": "souris", "city": "ville", "cup": "tasse",
    "queen": "reine", "shirt": "chemise", "moon": "lune", "shop": "boutique",
}  # fmt: skip
NOUNS = MASCULINE | FEMININE
ADJECTIVES = {
    "black": ("noir", "noire"), "white": ("blanc", "blanche"), "green": ("vert", "verte"),
    "blue": ("bleu", "bleue"), "grey": ("gris", "grise"), "heavy": ("lourd", "lourde"),
    "cold": ("froid", "froide"), "expensive": ("cher", "chère"), "new": ("neuf", "neuve"),
}  # fmt: skip
# They tell the owner, or which one, and not the subject of a query.
DETERMINERS = {"my", "the", "a", "this"}


def phrases(count, held_out, seed):
    """Different queries such as "my green house": to train on, and to judge with."""
    pairs = [(adjective, noun) for adjective in ADJECTIVES for noun in NOUNS]
    if count + held_out > len(pairs):
        raise SystemExit(f"--held-out: at most {len(pairs) - count} with --offline, {count} are trained on")
    random.Random("held out").shuffle(pairs)
    test, rest = pairs[:held_out], pairs[held_out:]
    random.Random(seed).shuffle(rest)
    return [query_example(*it) for it in rest[:count]], [query_example(*it) for it in test]


def query_example(adjective, noun):
    """A query, and the strong model's answer with everything except the adjective."""
    example = dspy.Example(user_query=f"my {adjective} {noun}", target_response=f"my {noun}", pieces=["my"])
    return example.with_inputs("user_query")


def drop_wrong_adjectives(request):
    """A French phrase without the adjectives that are not right there."""
    words = request.lower().split()
    kept = []
    for place, word in enumerate(words):
        forms = next((it for it in ADJECTIVES.values() if word in it), None)
        before = words[place - 1] if place else ""
        if forms is None or (before in NOUNS.values() and word == forms[before in FEMININE.values()]):
            kept.append(word)
    return " ".join(kept)


def content_overlap(response, query):
    """The share of the words that are the query's, wherever they stand; whose it is does not count."""
    given, wanted = (
        [it for it in text.lower().split() if it not in DETERMINERS] for text in (response, query)
    )
    return len(set(given) & set(wanted)) / max(len(given), len(wanted), 1)


def answer_by_rules(text):
    """The judge's answer to a prompt whose fields ask for one, else the untrusted model's."""
    if "[[ ## response_a ## ]]" in text:
        query, a, b = (field(text, name) for name in ("user_query", "response_a", "response_b"))
        return format_field("at_least_as_good", content_overlap(a, query) >= content_overlap(b, query))
    if "[[ ## private_pieces ## ]]" in text:
        pieces = json.loads(field(text, "private_pieces"))
        words = field(text, "llm_request").lower().split()
        return format_field("pieces_given_away", len(pieces) * bool({"mon", "ma", "mes"} & set(words)))
    return drop_wrong_adjectives(text)


def field(text, name):
    """A field of a prompt that DSPy wrote."""
    return text.rpartition(f"[[ ## {name} ## ]]\n")[2].partition("\n\n")[0].strip()


def format_field(name, value):
    return f"[[ ## {name} ## ]]\n{value}\n\n[[ ## completed ## ]]"


class OfflineServer:
    """An OpenAI-like server on this computer, of this process: the untrusted model and the judge."""

    def __init__(self):
        self.request_count = 0
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                owner.request_count += 1
                message = {"role": "assistant", "content": answer_by_rules(body["messages"][-1]["content"])}
                choice = {"index": 0, "message": message, "finish_reason": "stop"}
                usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
                answer = {"id": "offline", "object": "chat.completion", "created": 0, "model": body["model"]}
                sent = json.dumps(answer | {"choices": [choice], "usage": usage}).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(sent)))
                self.end_headers()
                self.wfile.write(sent)

            def log_message(self, format, *words):  # noqa: A002 - as http.server calls it
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_address[1]}/v1"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


def loader():
    """`datasets.load_dataset`, or how to get it."""
    try:
        from datasets import load_dataset  # not needed offline
    except ImportError:
        raise SystemExit(
            'the data needs a package: pip install "datasets>=3" (or run it with --offline)'
        ) from None
    return load_dataset


if __name__ == "__main__":
    main()
