"""The bodies of ART's clients, read: a model, groups of trajectories as its release 0.4 dumps them, keywords.

    {"model", "trajectory_groups": [{"trajectories": [{"messages_and_choices", "additional_histories",
     "reward", "metrics"}], "exceptions"}], "config", "dev_config", "split"}

A trajectory is one member, by the samples that its choices name (`slipway`). Nothing is matched by its text:
a choice of another model, in whose place another's words would be trained, is counted. Neighbours: routes.py
reads with these. Pure.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import mean, stdev
from typing import Any

from pydantic import ValidationError

from runtime.gateway.http.openai_errors import ApiError
from runtime.shared.schema import Group, Member

MOST_GROUPS = 4096
# What a name may not be: it is asked for as a model, and `@` stands before a step.
_NAME = re.compile(r"[^\s@/\\\x00-\x1f][^@\\\x00-\x1f]{0,127}")
_SPLIT = re.compile(r"[\w.-]{1,64}")
_METRICS = 64

# As `launcher/client/trajectories/members.py` says it of the same.
OTHERS = "answer of another model"
EMPTY = "no answer in its trajectory"
TWICE = "named twice"


@dataclass(frozen=True)
class Model:
    """A model as a client has it. `config`: of how it wants it trained and served."""

    name: str
    base_model: str | None
    trainable: bool
    config: dict[str, Any]


@dataclass(frozen=True)
class Groups:
    """Groups to train, what of them is left out, by reason, and how their trajectories were, by split."""

    groups: list[Group]
    dropped: Counter[str]
    means: dict[str, float]
    rewards: list[float]
    digest: str

    @property
    def standard_error(self) -> float | None:
        """Of the mean reward."""
        count = len(self.rewards)
        return stdev(self.rewards) / math.sqrt(count) if count > 1 else None


@dataclass
class _Seen:
    """What has been read of some groups so far."""

    dropped: Counter[str] = field(default_factory=Counter)
    values: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


def model_of(said: dict[str, Any]) -> Model:
    """The model that a body is about. Raises ApiError(400)."""
    name, base = said.get("name"), said.get("base_model")
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name != name.strip():
        raise ApiError(400, "a model's name has 1 to 128 characters, and no '@' in it", param="name")
    config = said.get("_internal_config")
    return Model(
        name,
        base if isinstance(base, str) else None,
        bool(said.get("trainable", base is not None)),
        config if isinstance(config, dict) else {},
    )


def model_in(said: dict[str, Any]) -> Model:
    """The same of a body that has other things beside it. Raises ApiError(400)."""
    model = said.get("model")
    if not isinstance(model, dict):
        raise ApiError(400, "model is missing", param="model")
    return model_of(model)


def split_of(said: dict[str, Any]) -> str:
    """Of what the logged trajectories are. Raises ApiError(400)."""
    split = said.get("split", "val")
    if not isinstance(split, str) or not _SPLIT.fullmatch(split):
        raise ApiError(400, "split must be a word, such as val", param="split")
    return split


def keywords_of(said: dict[str, Any]) -> dict[str, Any]:
    """What a client said of its step: `config`, and its `dev_config` beside it. Raises ApiError(400)."""
    found: dict[str, Any] = {}
    for name in ("config", "dev_config"):
        part = said.get(name) or {}
        if not isinstance(part, dict):
            raise ApiError(400, f"{name} must be an object", param=name)
        found |= part
    return found


def groups_of(said: dict[str, Any]) -> Groups:
    """The groups of trajectories in a body. Raises ApiError(400)."""
    listed = said.get("trajectory_groups")
    if not isinstance(listed, list) or len(listed) > MOST_GROUPS:
        message = f"trajectory_groups must be a list of {MOST_GROUPS} groups at most"
        raise ApiError(400, message, param="trajectory_groups")
    seen, groups = _Seen(), []
    for number, one in enumerate(listed):
        try:
            members = [*_members(one, seen)]
            groups += [Group(id=str(number), members=members)] if members else []
        except (AttributeError, TypeError, ValidationError) as error:
            where = f"trajectory_groups[{number}]"
            raise ApiError(400, f"{where} is no group of trajectories", param=where) from error
    means = {name: mean(values) for name, values in seen.values.items()}
    return Groups(groups, seen.dropped, means, seen.values.get("reward", []), _digest(groups))


def _members(group: dict[str, Any], seen: _Seen) -> Iterator[Member]:
    for exception in group.get("exceptions") or ():
        words = re.findall(r"\w+", str(exception.get("type")))
        seen.dropped[f"raised {words[-1] if words else 'an error'}"[:80]] += 1
        seen.values["exception_rate"].append(1.0)
    for trajectory in group["trajectories"]:
        seen.values["exception_rate"].append(0.0)
        reward = _number(trajectory.get("reward"))
        if reward is not None and math.isfinite(reward):
            seen.values["reward"].append(reward)
        for name, value in [*(trajectory.get("metrics") or {}).items()][:_METRICS]:
            number = _number(value)
            if number is not None and math.isfinite(number):
                seen.values[str(name)[:64]].append(number)
        samples = _samples(trajectory, seen.dropped)
        if samples:
            failure = "no reward" if reward is None else None
            yield Member(samples=samples, reward=reward, failure=failure)


def _samples(trajectory: dict[str, Any], dropped: Counter[str]) -> list[str]:
    """The samples that its choices name, each once, its own history's first."""
    choices, found = 0, dict[str, None]()
    for history in (trajectory, *(trajectory.get("additional_histories") or ())):
        for entry in history.get("messages_and_choices") or ():
            if not isinstance(entry.get("message"), dict):
                continue  # a message that was written
            choices += 1
            named = entry.get("slipway")
            sample = named.get("sample") if isinstance(named, dict) else None
            if not isinstance(sample, str) or not sample:
                dropped[OTHERS] += 1
            elif sample in found:
                dropped[TWICE] += 1
            else:
                found[sample] = None
    dropped[EMPTY] += not choices
    return [*found]


def _number(said: Any) -> float | None:
    try:
        return float(said)
    except (TypeError, ValueError, OverflowError):
        return None


def _digest(groups: list[Group]) -> str:
    """By which the same groups are known when they come again."""
    said = [group.model_dump(mode="json", exclude_defaults=True) for group in groups]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:32]
