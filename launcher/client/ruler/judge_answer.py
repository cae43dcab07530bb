"""Reads a judge's scores in its answer: by the given ids, never by their place; all of them or none.

Neighbours: `judge_prompt.py` gave the ids, `judge_retries.py` asks again if this raises. Knows nothing of
trajectories.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.client.ruler.judge_failures import AnswerUnusable

# The fences that models put around JSON.
_FENCED = re.compile(r"```(?:json)?\s*(\{.*?)```", re.DOTALL)
_MAX_CANDIDATES = 32
_NO_JSON = "it holds no JSON object with the key scores"
_MAX_EXPLANATION_CHARACTERS = 2000


@dataclass(frozen=True)
class JudgeScore:
    """From 0 to 1."""

    score: float
    explanation: str = ""


def parse_scores(text: str, ids: Sequence[str]) -> dict[str, JudgeScore]:
    """The score of each id. Raises AnswerUnusable if one is missing, doubled, unknown or no such number.

    Around the JSON there may be prose, and in that a draft: the last that is whole counts.
    """
    problem = _NO_JSON
    for found in reversed(json_objects_with(text, "scores")):
        try:
            return _validate(found, ids)
        except AnswerUnusable as error:
            problem = str(error) if problem == _NO_JSON else problem
    raise AnswerUnusable(problem)


def json_objects_with(text: str, key: str) -> list[Mapping[str, Any]]:
    """The JSON objects with this key in an answer, in their order: all of it, in fences, or within prose."""
    text = text.strip()
    places = [match.start() for match in re.finditer(r'\{\s*"' + re.escape(key) + '"', text)]
    places += [match.start(1) for match in _FENCED.finditer(text)]
    whole = _json_at(text, 0, to_its_end=True)
    found = (
        [_json_at(text, place) for place in sorted(places)[-_MAX_CANDIDATES:]] if whole is None else [whole]
    )
    return [one for one in found if isinstance(one, Mapping) and key in one]


def _json_at(text: str, place: int, to_its_end: bool = False) -> Any:
    try:
        found, end = json.JSONDecoder().raw_decode(text, place)
    except (ValueError, RecursionError):
        return None
    return None if to_its_end and end < len(text) else found


def _validate(found: Mapping[str, Any], ids: Sequence[str]) -> dict[str, JudgeScore]:
    entries = found.get("scores")
    if not isinstance(entries, list):
        raise AnswerUnusable("its scores are no list")
    scores: dict[str, JudgeScore] = {}
    for entry in entries:
        trajectory_id = entry.get("trajectory_id") if isinstance(entry, Mapping) else None
        name = trajectory_id.strip() if isinstance(trajectory_id, str) else ""
        if name not in ids:
            raise AnswerUnusable("it scores an id that no trajectory has")
        if name in scores:
            raise AnswerUnusable(f"it scores {name} twice")
        explanation = entry.get("explanation")
        shortened = explanation[:_MAX_EXPLANATION_CHARACTERS] if isinstance(explanation, str) else ""
        scores[name] = JudgeScore(_score_value(entry.get("score"), name), shortened)
    if missing := [name for name in ids if name not in scores]:
        raise AnswerUnusable(f"it has no score for {', '.join(missing)}")
    return scores


def _score_value(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise AnswerUnusable(f"the score of {name} is no number")
    if not 0 <= value <= 1:  # nor is NaN
        raise AnswerUnusable(f"the score of {name} is not from 0 to 1")
    return float(value)
