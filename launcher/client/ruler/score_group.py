"""RULER: the trajectories of a group scored by a judge, in comparison with one another.

    group = await ruler_score_group(group, "openai/o3")

The names, arguments and metrics are those of openpipe-art's RULER. There are three differences. A score
belongs to the id it was given for. A judge that misbehaves is asked again. A group that it does not judge
comes back without trajectories and with an exception for each, so that it is counted and never trained.
Neighbours: `judge_prompt.py` words the question, `judge_retries.py` asks it, `scored_groups.py` makes the
returned group. Knows nothing of training.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.base.sanitize import plain_text as sanitized
from launcher.client.ruler.conversations import Conversation, conversation_of, messages_shown, tools_of
from launcher.client.ruler.judge_answer import JudgeScore, parse_scores
from launcher.client.ruler.judge_cache import JudgementCache
from launcher.client.ruler.judge_failures import JudgeFailed
from launcher.client.ruler.judge_prompt import DEFAULT_RUBRIC, build_judge_prompt, escape_json, scores_format
from launcher.client.ruler.judge_protocol import Judge
from launcher.client.ruler.judge_retries import Tries, ask_with_retries
from launcher.client.ruler.judge_usage import Usage
from launcher.client.ruler.judges import resolve_judge
from launcher.client.ruler.scored_groups import with_scores, without_trajectories
from launcher.client.trajectories.members import get_field

DEFAULT_JUDGE = "openai/o3"
_IN_MEMORY = JudgementCache()

Cache = JudgementCache | str | os.PathLike[str] | None


@dataclass(frozen=True)
class TrajectoryScore:
    """`trajectory_id`: the place among the message lists, from "1". `score`: from 0 to 1."""

    trajectory_id: str
    explanation: str
    score: float


async def ruler_score_group(
    group: Any,
    judge_model: Any = DEFAULT_JUDGE,
    extra_litellm_params: Mapping[str, Any] | None = None,
    rubric: str | None = DEFAULT_RUBRIC,
    *,
    swallow_exceptions: bool = False,
    debug: bool = False,
    cache: Cache = _IN_MEMORY,
    tries: Tries | None = None,
) -> Any:
    """The group with its scores as rewards: a copy, of the same type; the given group stays unchanged.

    `judge_model`: see `judges.py`. `extra_litellm_params` go with each question, to any judge. Each
    trajectory's own reward becomes its metric `independent_reward`, the score its metric `ruler_score`.
    Trajectories with the same content have the same score. `cache`: a folder in which judgements are kept,
    None for none at all; else they are kept in memory.

    A judge that gave no usable answer in `tries`: the group comes back with no trajectories and with a
    JudgeFailed for each of them, or is None with `swallow_exceptions`. A judge that cannot be asked at all
    raises JudgeUnusable, which is swallowed too.
    """
    trajectories = list(get_field(group, "trajectories"))
    if not trajectories:
        return group
    try:
        judge = resolve_judge(judge_model, extra_litellm_params)
        found, usage = await _judge(
            judge,
            [conversation_of(one) for one in trajectories],
            rubric or DEFAULT_RUBRIC,
            tools_of(trajectories),
            cache,
            tries or Tries(),
        )
    except JudgeFailed as error:
        _log(f"RULER: {error.message}: {error.why}; a group of {len(trajectories)} is left out")
        return None if swallow_exceptions else without_trajectories(group, error)
    except Exception as error:  # swallowed if the caller asks for that, and logged
        if not swallow_exceptions:
            raise
        _log(f"RULER: {type(error).__name__}: {error}; a group of {len(trajectories)} is left out")
        return None
    if debug:
        _log_scores(found)
    return with_scores(group, found, judge.name, usage)


async def ruler(
    message_lists: Iterable[Sequence[Any]],
    judge_model: Any = DEFAULT_JUDGE,
    extra_litellm_params: Mapping[str, Any] | None = None,
    rubric: str | None = DEFAULT_RUBRIC,
    tools: Sequence[Any] | None = None,
    *,
    debug: bool = False,
    cache: Cache = _IN_MEMORY,
    tries: Tries | None = None,
) -> list[TrajectoryScore]:
    """The scores of conversations, in their order. Raises JudgeFailed or JudgeUnusable."""
    shown = [messages_shown(one) for one in message_lists]
    if not shown:
        return []
    judge = resolve_judge(judge_model, extra_litellm_params)
    tools = tools_of([{"tools": tools}])
    found, _ = await _judge(judge, shown, rubric or DEFAULT_RUBRIC, tools, cache, tries or Tries())
    if debug:
        _log_scores(found)
    return [TrajectoryScore(str(place), one.explanation, one.score) for place, one in enumerate(found, 1)]


async def _judge(
    judge: Judge,
    conversations: Sequence[Conversation],
    rubric: str,
    tools: list[Any] | None,
    cache: Cache,
    tries: Tries,
) -> tuple[list[JudgeScore], Usage]:
    """The score of each conversation; those that are the same are judged once."""
    distinct: list[Conversation] = []
    for one in conversations:
        distinct += [] if one in distinct else [one]
    prompt = build_judge_prompt(distinct, rubric, tools)
    kept = cache if isinstance(cache, JudgementCache | None) else JudgementCache(cache)
    identity = judge.identity if kept is not None else None
    scores = kept.find(identity, prompt.digest) if kept is not None and identity is not None else None
    usage = Usage()
    if scores is None or scores.keys() != set(prompt.ids):
        scores, usage = await ask_with_retries(
            judge,
            prompt.messages,
            scores_format(prompt.ids),
            lambda text: parse_scores(text, prompt.ids),
            tries,
        )
        if kept is not None and identity is not None:
            try:
                kept.keep(identity, prompt.digest, scores)
            except OSError as error:  # a full disk: it is paid for, and stands all the same
                _log(f"RULER: a judgement is not kept: {error}")
    return [scores[prompt.ids[distinct.index(one)]] for one in conversations], usage


def _log_scores(found: Sequence[JudgeScore]) -> None:
    for place, one in enumerate(found, 1):
        _log(f"RULER: {place}: {one.score:g} {escape_json(one.explanation)}")


def _log(line: str) -> None:
    sys.stderr.write(f"slipway: {sanitized(line)}\n")
    sys.stderr.flush()
