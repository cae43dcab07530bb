"""The bodies of Arbor's clients, read: laxer than Arbor itself, and no guess at what they do not say.

Neighbours: routes.py reads with these; jobs.py gets what they mean. Pure.
A completion may be a message or its text, a batch one group or a list of groups, and keys that nobody knows
are left alone. What has no reward is no zero: such a member keeps its place and says why (C22).
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import dataclass
from typing import Any

from runtime.gateway.http.openai_errors import ApiError
from runtime.shared.schema import Member

MOST_GROUPS = 256  # in one batch
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}")
_METRICS = 64


@dataclass(frozen=True)
class Posted:
    """`…/step`: the groups of one batch id, and what the client measured beside them."""

    job: str
    batch: int
    digest: str
    groups: list[list[Member]]
    metrics: dict[str, float]


def whole(body: bytes) -> dict[str, Any]:
    """The body as an object; none at all is an empty one. Raises ApiError(400)."""
    try:
        said = json.loads(body or b"{}")
    except ValueError as error:  # of bytes that are no text as well
        raise ApiError(400, "the body is not JSON") from error
    if not isinstance(said, dict):
        raise ApiError(400, "the body must be a JSON object")
    return said


def job_of(said: dict[str, Any]) -> str:
    """The job that a body is about. Raises ApiError(400)."""
    job = said.get("job_id")
    if not isinstance(job, str) or not job:
        raise ApiError(400, "job_id is missing: initialize answers with one", param="job_id")
    return job


def posted(said: dict[str, Any]) -> Posted:
    """The groups of a step. Raises ApiError(400)."""
    batch = said.get("batch_id")
    if not isinstance(batch, int) or isinstance(batch, bool):
        raise ApiError(400, "batch_id must be one of the pending_batch_ids", param="batch_id")
    groups = [
        [_member(one, f"batch[{number}]") for number, one in enumerate(group)] for group in _groups(said)
    ]
    return Posted(job_of(said), batch, digest_of(groups), groups, _metrics(said.get("metrics")))


def checkpoint_name(said: dict[str, Any]) -> str:
    """The name of a checkpoint, which is in no path and in no address. Raises ApiError(400)."""
    name = said.get("checkpoint_name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        message = "checkpoint_name must be letters, digits, '_', '.' and '-', 64 of them at most"
        raise ApiError(400, message, param="checkpoint_name")
    return name


def digest_of(groups: list[list[Member]]) -> str:
    """By which groups that come again are known."""
    said = [[member.model_dump(mode="json", exclude_defaults=True) for member in group] for group in groups]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _groups(said: dict[str, Any]) -> list[list[Any]]:
    batch = said.get("batch")
    if not isinstance(batch, list) or not batch:
        raise ApiError(400, "batch must be a list of completions with their rewards", param="batch")
    groups = batch if all(isinstance(one, list) for one in batch) else [batch]
    if len(groups) > MOST_GROUPS or not all(groups):
        raise ApiError(400, f"a batch has 1 to {MOST_GROUPS} groups, none of them empty", param="batch")
    return groups


def _member(said: Any, where: str) -> Member:
    if not isinstance(said, dict) or not isinstance(said.get("messages"), list):
        raise ApiError(400, f"{where} must have messages, a completion and a reward", param="batch")
    reward, failure = _reward(said.get("reward"))
    fields: dict[str, Any] = {"messages": said["messages"], "reward": reward, "failure": failure}
    try:
        return Member(**fields, **_completion(said.get("completion")))
    except ValueError as error:
        raise ApiError(400, f"{where}: {error}", param="batch") from error


def _completion(said: Any) -> dict[str, Any]:
    """What an answer said, as a member has it."""
    message = said if isinstance(said, dict) else {"content": said}
    text, calls = message.get("content"), message.get("tool_calls") or None
    if isinstance(text, list):  # in parts
        text = "".join(str(part.get("text", "")) for part in text if isinstance(part, dict))
    if not isinstance(text, str) and calls is None:
        raise ValueError("completion must be a text, or a message with one, or with tool_calls")
    return {"completion": text, "tool_calls": calls}


def _reward(said: Any) -> tuple[float | None, str | None]:
    """A reward, or why there is none."""
    if said is None:
        return None, "no reward"
    try:
        reward = float(said)
    except (TypeError, ValueError, OverflowError):
        return None, "reward not a number"
    return (reward, None) if math.isfinite(reward) else (None, "reward not finite")


def _metrics(said: Any) -> dict[str, float]:
    """The numbers among a client's metrics."""
    if not isinstance(said, dict):
        return {}
    numbers = {
        str(name)[:64]: float(value)
        for name, value in list(said.items())[:_METRICS]
        if isinstance(value, (int, float)) and abs(value) < math.inf
    }
    return numbers
