"""A group as RULER gives it back: a copy of the same type with scores as rewards, or one that is left out.

Ours, openpipe-art's of any release, or the JSON of either. Neighbours: `score_group.py` has the scores;
`launcher/client/trajectories/members.py` counts the group's content. Knows nothing of judges.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.client.ruler.judge_answer import JudgeScore
from launcher.client.ruler.judge_failures import JudgeFailed
from launcher.client.ruler.judge_usage import Usage
from launcher.client.trajectories.members import get_field


def with_scores(group: Any, scores: Sequence[JudgeScore], judge: str, usage: Usage) -> Any:
    """The group with these rewards, in its trajectories' order; the usage of judging is in its metrics."""
    trajectories = [
        _scored(one, score) for one, score in zip(get_field(group, "trajectories"), scores, strict=True)
    ]
    return _group(group, trajectories, [], _record(usage), {"ruler_judge": judge})


def without_trajectories(group: Any, error: JudgeFailed) -> Any:
    """The group with no trajectories, and this exception in the place of each."""
    raised = [error] * len(get_field(group, "trajectories"))
    return _group(group, [], raised, _record(error.usage), {"ruler_failure": error.message})


def _record(usage: Usage) -> dict[str, float | int]:
    record: dict[str, float | int] = {
        "ruler_requests": usage.requests,
        "ruler_prompt_tokens": usage.prompt_tokens,
        "ruler_completion_tokens": usage.completion_tokens,
    }
    return record if usage.cost is None else record | {"ruler_cost": usage.cost}


def _scored(trajectory: Any, score: JudgeScore) -> Any:
    metrics = dict(get_field(trajectory, "metrics") or {})
    own = get_field(trajectory, "reward")
    if own is not None:
        metrics["independent_reward"] = own
    metrics["ruler_score"] = score.score
    logs = [*(get_field(trajectory, "logs") or ()), f"RULER: {score.score:g}: {score.explanation}"]
    kept: dict[str, Any] = {"messages_and_choices": list(get_field(trajectory, "messages_and_choices") or ())}
    kept["metadata"] = dict(get_field(trajectory, "metadata") or {})
    return _copy_with(trajectory, reward=score.score, metrics=metrics, logs=logs, **kept)


def _copy_with(trajectory: Any, **values: Any) -> Any:
    """A copy that shares only values that are never changed."""
    if isinstance(trajectory, Mapping):
        return {**trajectory, **values}
    made = copy.copy(trajectory)
    for name, value in values.items():
        setattr(made, name, value)
    return made


def _group(
    group: Any,
    trajectories: list[Any],
    raised: list[JudgeFailed],
    usage_metrics: Mapping[str, Any],
    extra_metadata: Any,
) -> Any:
    kept: dict[str, Any] = {
        "metadata": {**(get_field(group, "metadata") or {}), **extra_metadata},
        "metrics": {**(get_field(group, "metrics") or {}), **usage_metrics},
        "logs": [*(get_field(group, "logs") or ())],
    }
    before = [*(get_field(group, "exceptions") or ())]
    if isinstance(group, Mapping):
        return {
            **group,
            **kept,
            "trajectories": trajectories,
            "exceptions": before + _exceptions_as_json(raised),
        }
    # Through its own constructor, which makes data of exceptions; of old releases it takes fewer fields.
    fields = getattr(type(group), "model_fields", kept)
    fit = {name: value for name, value in kept.items() if name in fields}
    made = type(group)(trajectories, exceptions=raised, **fit)
    made.exceptions = [*before, *made.exceptions]
    return made


def _exceptions_as_json(raised: Sequence[JudgeFailed]) -> list[dict[str, str]]:
    return [{"type": type(it).__name__, "message": str(it), "traceback": ""} for it in raised]
