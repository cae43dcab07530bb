"""Summaries whose reward is RULER's: a judge compares the tries of a group with one another.

    launch --gpus H100 --model Qwen/Qwen2.5-7B-Instruct -- python summarise_ruler.py
    launch -- python summarise_ruler.py --offline

Cost and duration: offline $0.00 and a minute on 2 busy cores; rented about $20 and five hours on one H100,
the judge included (estimated).

There is no right answer and no reward function: the judge is given a rubric, all summaries of one document
and nothing else. A judge that gives no usable answer leaves its group out, and that is counted. The trained
policy is compared with its beginning in the same way: one judge gets both summaries of a document.

Rented the documents are ServiceNow/repliqa (`pip install "datasets>=3"`), the judge is --judge, a name of
LiteLLM's (openai/gpt-4.1-mini with your OPENAI_API_KEY; with `--openai-env` that name is the run's own key:
put yours into JUDGE_API_KEY), 8 documents a step with 8 tries each, 60 steps. Offline a document is "the
black cat under the cold house", its summary French, and the judge is played in this process, by rules: a
document's nouns should be kept, and their adjectives left out. `--judge base`, in either form, uses the run's
own model from before training; the tiny model cannot judge, so that all groups are left out.

Offline 15 steps brought the judge's score of 24 held-out documents from 0.58 to 0.67, 0.78 and 0.70, for
three seeds. Rented it has not been run. Figure to beat: 37 % → 70 % of the questions about a document
answered from its summary, in 4 hours for $22 (the summarizer of ART's tutorial, whose reward is those
questions and not RULER). By its authors, RULER did slightly better in 3 of 4 tasks than a reward made by
hand.
"""

import argparse
import asyncio
import json
import os
import random
import re
from statistics import fmean, stdev

from openai import AsyncOpenAI

from launcher.client import (
    Trajectory,
    TrajectoryGroup,
    connect,
    gather_trajectory_groups,
    ruler_score_group,
)

RUBRIC = """
- A summary that keeps what the document is about, and the facts somebody would ask for, scores high.
- A summary that says what the document does not say scores low, however well it reads.
- Every word that is not needed costs: a summary of more than {words} words scores low.
"""
SYSTEM = "Summarise the document in at most {words} words. Keep what somebody would ask about it."
MAX_WORDS = 120
# A longer document is cut off: it has to fit into the policy's context, and into the judge's.
MAX_CHARACTERS = 12_000

# Offline: the words that the tiny model knows.
NOUNS = {
    "cat": "chat", "dog": "chien", "book": "livre", "garden": "jardin", "bread": "pain", "horse": "cheval",
    "boat": "bateau", "bridge": "pont", "king": "roi", "house": "maison", "table": "table", "car": "voiture",
    "door": "porte", "flower": "fleur", "key": "clé", "apple": "pomme", "city": "ville", "queen": "reine",
}  # fmt: skip
ADJECTIVES = ("black", "white", "green", "blue", "grey", "heavy", "cold", "small", "big", "pretty")
LINKS = ("under", "on", "with", "behind")
# Two nouns with an article each, and the words that link them.
WORDS_NEEDED = 5


async def rollout(client, model, document, offline, temperature=1.0):
    trajectory = Trajectory(messages_and_choices=[*prompt_messages(document, offline)])
    response = await client.chat.completions.create(
        model=model,
        messages=trajectory.messages(),
        max_tokens=32 if offline else 2 * MAX_WORDS,
        temperature=temperature,
    )
    trajectory.messages_and_choices.append(response.choices[0])
    trajectory.metrics["words"] = len(summary_text(response.choices[0].message.content or "").split())
    return trajectory.finish()


def prompt_messages(document, offline):
    if offline:
        import dspy  # the tiny model knows one form of prompt, which is DSPy's

        signature = dspy.make_signature("english -> french")
        return dspy.ChatAdapter().format(signature, [], {"english": document})
    return [
        {"role": "system", "content": SYSTEM.format(words=MAX_WORDS)},
        {"role": "user", "content": document},
    ]


def summary_text(content):
    """The summary in an answer: the content of the field, if the tiny model writes one."""
    return content.partition("## ]]")[2].partition("[[")[0] if "## ]]" in content else content


def rewards_of(groups):
    return [one.reward for group in groups for one in group if one.reward is not None]


async def main() -> None:
    parser = argparse.ArgumentParser(description="Summaries, scored by RULER.")
    parser.add_argument("--offline", action="store_true", help="phrases, on the tiny model")
    parser.add_argument("--judge", help="LiteLLM's name of a model, or base; default: see above")
    parser.add_argument("--steps", type=int, help="default: 60, or 15 with --offline")
    parser.add_argument("--documents", type=int, default=8, help="in each step; default: 8")
    parser.add_argument("--tries", type=int, default=8, help="of each document; default: 8")
    parser.add_argument("--held-out", type=int, default=24, help="documents to judge with; default: 24")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    steps = args.steps or (15 if args.offline else 60)
    judge, judge_params = make_judge(args.judge, args.offline)
    documents = phrases(400) if args.offline else load_repliqa(1000)
    held_out, train = documents[: args.held_out], documents[args.held_out :]
    run = connect()
    client = AsyncOpenAI(base_url=run.base_url, api_key=run.api_key, timeout=run.patience.answer_seconds)

    async def score_group(group):
        return await ruler_score_group(group, judge, judge_params, RUBRIC.format(words=MAX_WORDS))

    results_file = run.run_dir / "summarise_ruler.json" if run.run_dir else None
    steps_done = run.read_state().get("summarise_ruler", 0)
    if steps_done >= steps and results_file and results_file.exists():
        print(f"this training had finished before: {results_file} stays as it is")
        return
    counts, rewards = {"trained": 0, "dropped": 0, "not_judged": 0}, []
    for number in range(steps_done, steps):
        batch = random.Random(f"{args.seed} {number}").sample(train, args.documents)
        groups = await gather_trajectory_groups(
            (
                TrajectoryGroup(rollout(client, run.model, it, args.offline) for _ in range(args.tries))
                for it in batch
            ),
            pbar_desc=f"step {number + 1}",
            max_exceptions=0.1,
            after_each=score_group,
        )
        result = await run.train_async(groups, state={"summarise_ruler": number + 1})
        run.log(groups, split="train", metrics=result.metrics, step=result.step)
        scores = rewards_of(groups)
        rewards.append(fmean(scores) if scores else 0.0)
        counts["trained"] += result.trained
        counts["dropped"] += sum(result.dropped.values())
        counts["not_judged"] += sum(not len(group) for group in groups)
        print(f"step {number + 1}/{steps}: reward {rewards[-1]:.3f}, trained {result.trained}")

    # Both before one judge, because its scores compare one summary with the other.
    pairs = await gather_trajectory_groups(
        (
            TrajectoryGroup(
                rollout(client, model, it, args.offline, temperature=0.0) for model in ("base", run.model)
            )
            for it in held_out
        ),
        pbar_desc="held out",
        after_each=score_group,
    )
    pairs = [group for group in pairs if len(group) == 2]
    found = {"rewards": rewards, **counts, "pairs": len(pairs)}
    if len(pairs) > 1:
        before, after = rewards_of(pairs)[0::2], rewards_of(pairs)[1::2]
        run.log([TrajectoryGroup([pair.trajectories[1]]) for pair in pairs])
        rises = [new - old for old, new in zip(before, after, strict=True)]
        error = stdev(rises) / len(rises) ** 0.5
        scores = f"{fmean(before):.3f} → {fmean(after):.3f} over {len(pairs)}"
        print(f"held-out, judged together: {scores}: {fmean(rises):+.3f} ± {error:.3f}")
        found |= {"before": fmean(before), "after": fmean(after), "error": error}
    print(f"groups that the judge left out: {counts['not_judged']}, pairs: {len(held_out) - len(pairs)}")
    if results_file:
        results_file.write_text(json.dumps(found, indent=2) + "\n")


def make_judge(name, offline):
    """The judge for `ruler_score_group`, and the parameters of each question to it."""
    name = name or ("" if offline else "openai/gpt-4.1-mini")
    if not name:
        return (LocalJudge(), "rules"), None
    if not name.startswith("openai/"):
        return name, None
    # An address of its own: with `launch --openai-env` OPENAI_BASE_URL would send it to the policy.
    return name, {"api_base": "https://api.openai.com/v1", "api_key": own_key()}


def own_key():
    """Your OpenAI key, which is never sent to the run, nor the run's to OpenAI."""
    key = os.environ.get("JUDGE_API_KEY")
    if not key and not os.environ.get("OPENAI_BASE_URL"):
        key = os.environ.get("OPENAI_API_KEY")
    if not key:
        raise SystemExit("the judge needs a key: export JUDGE_API_KEY=... (or --offline)")
    return key


class LocalJudge:
    """An object with the methods of an OpenAI client that answers RULER's question by rules."""

    def __init__(self):
        self.chat = self.completions = self

    async def create(self, *, messages, **_):
        """A score for each trajectory of the question, by its id."""
        text = messages[-1]["content"]
        shown = re.findall(r'<(context|trajectory)(?: id="([^"]+)")?>\n(.*?)\n</\1>', text, re.DOTALL)
        common = [it for tag, _, body in shown if tag == "context" for it in json.loads(body)]
        scores = [
            {"trajectory_id": name, "explanation": "by rules", "score": rule_score(common + json.loads(body))}
            for tag, name, body in shown
            if tag == "trajectory"
        ]
        return {"choices": [{"message": {"role": "assistant", "content": json.dumps({"scores": scores})}}]}


def rule_score(conversation):
    """The share of the document's nouns that are kept, less a share for other words."""
    document = next(it["content"] for it in conversation if it["role"] == "user")
    document = document.partition("]]\n")[2].partition("\n")[0].split()
    words = summary_text(conversation[-1]["content"]).lower().split()
    wanted = {NOUNS[it] for it in document if it in NOUNS}
    return len(wanted & set(words)) / len(wanted) * min(1.0, WORDS_NEEDED / max(1, len(words)))


def phrases(count):
    """Different ones such as "the black cat under the cold house"."""
    rng = random.Random("phrases")
    found = {}
    while len(found) < count:
        one, other = rng.sample([*NOUNS], 2)
        first, second = rng.choices(ADJECTIVES, k=2)
        found[f"the {first} {one} {rng.choice(LINKS)} the {second} {other}"] = None
    return [*found]


def load_repliqa(count):
    rows = loader()("ServiceNow/repliqa", split="repliqa_0")
    texts = {row["document_id"]: row["document_extracted"][:MAX_CHARACTERS] for row in rows}
    found = [*texts.values()]
    random.Random("documents").shuffle(found)
    return found[:count]


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
    asyncio.run(main())
