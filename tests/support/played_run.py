"""A run as its files at home have it, of any length: for what reads them, without a machine or a model.

Its completions hold what a page must show as text: markup, a script, tool calls, a thought.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from launcher.records.records import RecordStore, RunRecord

PREDICTORS = ("search", "answer")
MARKUP = (
    "<script>document.title = 'owned'</script><img src=x onerror=\"document.title='owned'\"> & \"Friday\""
)
CALL = '<tool_call>\n{"name": "search_inbox", "arguments": {"query": "the review", "limit": 5}}\n</tool_call>'
_THOUGHT = "<think>I look for the newest message about it.</think>"
_ANSWERS = (
    "The review is moved to Friday at ten.",
    "It was moved to Thursday, if I read that right.",
    MARKUP,
)
_GROUP = 8
# The group that was asked nothing: every turn of its prompt is empty.
_SILENT = 2
_PLAN = {
    "where": "4×H100 on aws/us-east-1", "model": "Qwen/Qwen2.5-3B-Instruct", "price_per_hour": 27.52,
    "deadline_seconds": 14400.0, "lease_seconds": 900.0, "budget": 40.0, "cost_at_most": 129.26,
}  # fmt: skip
_STANDING = {"where": "AWS/us-east-1/us-east-1a", "instance_type": "p5.24xlarge", "price_per_hour": 27.52}


def played_run(
    store: RecordStore, name: str, steps: int, rollouts: int = 64, *, ended: bool = True
) -> RunRecord:
    """A rented run of so many steps, each with so many completions; proven to be down, or at work."""
    details = {"plan": _PLAN}
    machine = {"kind": "cloud", "standing": _STANDING}
    record = store.create(name=name, command=("python", "my.py"), details=details, machine=machine)
    results = store.folder(record.id) / "results"
    (results / "rollouts").mkdir(parents=True)
    chance = random.Random(7)
    for step in range(1, steps + 1):
        add_step(results, step, record.created + 45.0 * step, rollouts, chance)
    if not ended:
        return store.update(record.id, state="work")
    proof = {"verified": True, "detail": "no machine of it is listed by AWS us-east-1"}
    over = record.created + 45.0 * steps + 60
    return store.update(record.id, state="verified", ended=over, proof=proof)


def add_step(results: Path, step: int, now: float, rollouts: int, chance: random.Random) -> None:
    """One more step, as it comes home."""
    rewards = {name: 0.8 - 0.6 * 0.98**step + chance.gauss(0, 0.03) for name in PREDICTORS}
    dropped = {"no variance in its group": 8} if step % 3 == 0 else {}
    dropped |= {"stale": 1} if step % 5 == 0 else {}
    metrics = {f"reward/{name}": it for name, it in rewards.items()} | {"train_seconds": 9.0, "entropy": 0.5}
    counts = {
        "groups": rollouts // _GROUP,
        "members": rollouts,
        "samples": rollouts,
        "trained": rollouts - sum(dropped.values()),
    }
    counts |= {"sampled_tokens": 900 * rollouts, "turns_joined": rollouts // 2, "sealed": int(step % 4 == 0)}
    metrics |= {"reward": sum(rewards.values()) / 2}
    line = {"step": step, "version": step, "time": now, "kind": "train", "metrics": metrics}
    _add(results / "metrics.jsonl", line | {"counts": {**counts, "dropped": dropped}})
    _add(
        results / "publications.jsonl",
        {
            "version": step, "step": step, "outcome": "published", "name": f"policy@v{step}", "time": now,
            "seconds": 0.52, "engines": 3, "modules": 252, "sha256": f"{chance.getrandbits(256):064x}",
            "probe_tokens": 54, "max_error": 4.05e-06, "mean_error": 8.2e-07, "effect": 0.72,
        },
    )  # fmt: skip
    if step % 10 == 1:
        _add(
            results / "validations.jsonl",
            {
                "compile": "c1", "step": step, "name": "score", "version": step, "standard_error": 0.03,
                "score": 0.8 - 0.55 * 0.98**step,
            },
        )  # fmt: skip
    said = "".join(json.dumps(line) + "\n" for line in _said(step, rollouts, chance))
    (results / "rollouts" / f"step-{step:06d}.jsonl").write_text(said)


def _said(step: int, rollouts: int, chance: random.Random) -> Iterable[dict[str, Any]]:
    for at in range(rollouts):
        group = at // _GROUP
        predictor = PREDICTORS[group % 2]
        prompt, completion = _texts(predictor, group, _ANSWERS[at % len(_ANSWERS)])
        yield {
            "step": step, "group": f"task-{group}/{predictor}", "member": at % _GROUP,
            "rollout": f"r-{step}-{at}",
            "predictor": predictor, "call": 0, "turn": 0, "continues": None,
            "reward": round(chance.random(), 3), "failure": None,
            "dropped": "stale" if at == 9 and step % 5 == 0 else None,
            "version": max(0, step - 1 - (at % 4 == 0)), "temperature": 1.0, "finish_reason": "stop",
            "prompt_tokens": len(prompt) // 4, "tokens": len(completion) // 4, "prompt": prompt,
            "prompt_cut": False, "completion": completion, "completion_cut": False,
        }  # fmt: skip


def _texts(predictor: str, group: int, answer: str) -> tuple[str, str]:
    if group == _SILENT:
        return f"{_turn('user', '')}<|im_start|>assistant\n", f"{_THOUGHT}{CALL}<|im_end|>"
    asked = _turn("system", "You are an e-mail agent. Use the tools.")
    asked += _turn("user", f"When is the review of project {group} moved to?")
    if predictor == "search":
        return f"{asked}<|im_start|>assistant\n", f"{_THOUGHT}{CALL}<|im_end|>"
    found = '[{"id": 17, "subject": "Review moved", "body": "It is on Friday at ten."}]'
    asked += _turn("assistant", CALL) + _turn("user", f"<tool_response>\n{found}\n</tool_response>")
    return f"{asked}<|im_start|>assistant\n", f"{answer}<|im_end|>"


def _turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def _add(path: Path, line: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def played_agent(
    store: RecordStore, name: str, steps: int, rollouts: int, turns: int, *, ended: bool = True
) -> RunRecord:
    """An agent's run on this computer: each rollout is a conversation of so many turns with tools, as the
    runtime writes it."""
    plan = {"where": "this computer", "model": "tiny-agent", "price_per_hour": 0.0, "lease_seconds": 900.0}
    record = store.create(
        name=name,
        command=("python", "agent.py"),
        details={"plan": plan, "settings": {"model": "tiny-agent"}, "runtime": {"train.seed": 0}},
        machine={"kind": "cloud"},
    )
    results = store.folder(record.id) / "results"
    (results / "rollouts").mkdir(parents=True)
    chance = random.Random(11)
    for step in range(1, steps + 1):
        now = record.created + 20.0 * step
        metrics = {"reward": 0.9 - 0.7 * 0.97**step + chance.gauss(0, 0.02), "entropy": 0.6 * 0.99**step}
        metrics |= {"grad_norm": 0.4 + chance.random() / 5, "learning_rate": 5e-4, "kl_behaviour": 1e-5}
        counts = {"groups": rollouts // _GROUP, "members": rollouts, "samples": rollouts * turns}
        counts |= {"trained": rollouts * turns, "sampled_tokens": 40 * rollouts * turns, "dropped": {}}
        line = {"step": step, "version": step, "time": now, "kind": "train", "metrics": metrics}
        _add(results / "metrics.jsonl", line | {"counts": counts})
        talk = "".join(json.dumps(it) + "\n" for it in _talks(step, rollouts, turns, chance))
        (results / "rollouts" / f"step-{step:06d}.jsonl").write_text(talk)
    if not ended:
        return store.update(record.id, state="work")
    proof = {"verified": True, "detail": f"no process of {record.id} is left, its sockets are gone"}
    over = record.created + 20.0 * steps + 5
    return store.update(record.id, state="verified", ended=over, proof=proof)


def _talks(step: int, rollouts: int, turns: int, chance: random.Random) -> Iterable[dict[str, Any]]:
    for at in range(rollouts):
        reward = round(chance.random(), 3)
        for turn in range(turns):
            asked = _turn("user", f"What do {at + 2} lamps of the shop in street {at % 9} cost?")
            price = chance.randint(2, 99)
            heard = f"\n{_turn('tool', str(price))}<|im_start|>assistant\n"
            call = json.dumps({"name": "price_of", "arguments": {"item": "lamp", "street": f"{at % 9}"}})
            last = turn == turns - 1
            said = f"They cost {price * 2} euros." if last else f"<tool_call>\n{call}\n</tool_call>"
            yield {
                "step": step, "group": f"question-{at // _GROUP}", "member": at % _GROUP,
                "rollout": f"r-{step}-{at}",
                "predictor": None, "call": None, "turn": turn, "continues": turn - 1 if turn else None,
                "reward": reward, "failure": None, "dropped": None, "version": step - 1, "temperature": 1.0,
                "finish_reason": "stop" if last else "tool_calls",
                "prompt_tokens": 40 + 30 * turn, "tokens": 24, "completion": f"{said}<|im_end|>",
                "prompt": heard if turn else f"{asked}<|im_start|>assistant\n", "prompt_cut": False,
                "completion_cut": False,
            }  # fmt: skip
