"""Inputs for a task from its description, written by a language model: no two alike, and some held out.

Neighbours: `from_task.py` trains on them. Knows nothing of runs; of models it only sends requests.
"""

from __future__ import annotations

import math
import random
import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from launcher.client.failures import TrainingFailed
from launcher.client.ruler.judge_answer import json_objects_with
from launcher.client.ruler.judge_failures import AnswerUnusable
from launcher.client.ruler.judge_prompt import escape_json, json_schema_format
from launcher.client.ruler.judge_retries import Tries, ask_with_retries
from launcher.client.ruler.judge_usage import Usage
from launcher.client.ruler.judges import resolve_judge

_BATCH_SIZE = 25
# Requests beyond those that n needs, where a model repeats itself.
_EXTRA_REQUESTS = 3
_MAX_CHARACTERS = 8000
_MAX_SHOWN = 100
_SYSTEM_PROMPT = """\
You write inputs for an agent. You are told its task; an input is what one user gives it, word for word, and
everything that the agent gets to see besides its task. Inputs differ in subject, length, style and
difficulty, as those of different people do; some are hard.

Answer with JSON alone: {"scenarios": ["…", "…"]}\
"""
_RESPONSE_FORMAT = json_schema_format(
    "scenarios", {"scenarios": {"type": "array", "items": {"type": "string"}}}
)


@dataclass(frozen=True)
class Scenarios:
    """Inputs to train on, and held-out inputs for comparison.

    `doubled`: the number of inputs that the model wrote again. `usage`: the usage of all its requests.
    """

    train: list[str]
    validation: list[str]
    doubled: int = 0
    usage: Usage = field(default_factory=Usage)


async def scenarios(
    task: str,
    n: int,
    model: Any,
    *,
    validation: int | None = None,
    seed: int = 0,
    extra_litellm_params: Mapping[str, Any] | None = None,
    tries: Tries | None = None,
) -> Scenarios:
    """`n` inputs for the task, `validation` of them held out (a quarter, unless another number is given).

    `model`: the writer, given as `ruler_score_group` takes a judge. The choice of the held-out ones depends
    on `seed` and on the texts, not on the order in which they came. There are fewer if the model writes no
    more new ones. Raises TrainingFailed for fewer than two, JudgeFailed and JudgeUnusable as a judge does.
    """
    if n < 2:
        raise ValueError(f"a task needs at least 2 scenarios, one of them held out: {n}")
    judge = resolve_judge(model, extra_litellm_params)
    found: dict[str, str] = {}
    doubled, usage = 0, Usage()
    for _ in range(math.ceil(n / _BATCH_SIZE) + _EXTRA_REQUESTS):
        if len(found) >= n:
            break
        messages = _build_question(task, min(_BATCH_SIZE, n - len(found)), found.values())
        texts, took = await ask_with_retries(
            judge, messages, _RESPONSE_FORMAT, _parse_scenarios, tries or Tries()
        )
        usage += took
        for text in texts:
            doubled += normalised(text) in found
            if len(found) < n:
                found.setdefault(normalised(text), text)
    return _split(found, validation, seed, doubled, usage)


def normalised(text: str) -> str:
    """The same for texts that differ in case, width, blanks and punctuation alone."""
    words = re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold())
    return " ".join(words) or text.strip()


def _split(
    found: Mapping[str, str], validation: int | None, seed: int, doubled: int, usage: Usage
) -> Scenarios:
    held_out = max(1, len(found) // 4) if validation is None else validation
    if len(found) < held_out + 1:
        raise TrainingFailed(
            f"The model wrote {len(found)} scenarios that differ",
            f"{held_out} are to be held out, and at least one is to train on",
            "say in the task's description what the inputs are and how they differ, or take another model",
        )
    # Sorted by their text: the order in which a model writes them must not matter.
    ordered = [found[key] for key in sorted(found)]
    random.Random(seed).shuffle(ordered)
    return Scenarios(ordered[held_out:], ordered[:held_out], doubled, usage)


def _build_question(task: str, count: int, there: Iterable[str]) -> list[dict[str, Any]]:
    parts = [f"The agent's task:\n{task}", f"Write {count} inputs."]
    if shown := [*there][-_MAX_SHOWN:]:
        parts.insert(1, f"These are there already; write none of them again:\n{escape_json(shown)}")
    return [{"role": "system", "content": _SYSTEM_PROMPT}, {"role": "user", "content": "\n\n".join(parts)}]


def _parse_scenarios(text: str) -> list[str]:
    for found in reversed(json_objects_with(text, "scenarios")):
        listed = found["scenarios"]
        if isinstance(listed, list):
            texts = [one.strip()[:_MAX_CHARACTERS] for one in listed if isinstance(one, str) and one.strip()]
            if texts:
                return texts
    raise AnswerUnusable("it holds no JSON object whose key scenarios has a list of texts")
