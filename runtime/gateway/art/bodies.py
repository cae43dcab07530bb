"""The bodies of ART's clients, read: a model, groups of trajectories as its release 0.4 dumps them, keywords.

    {"model", "trajectory_groups": [{"trajectories": [{"messages_and_choices", "additional_histories",
     "reward", "metrics"}], "exceptions"}], "config", "dev_config", "split"}

Neighbours: routes.py reads with these; members.py finds which samples the choices are. Pure.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

from runtime.gateway.http.openai_errors import ApiError

MOST_GROUPS = 4096
# What a name may not be: it is asked for as a model, and `@` stands before a step.
_NAME = re.compile(r"[^\s@/\\\x00-\x1f][^@\\\x00-\x1f]{0,127}")
_SPLIT = re.compile(r"[\w.-]{1,64}")
_METRICS = 64


@dataclass(frozen=True)
class Model:
    """A model as a client has it. `config`: of how it wants it trained and served."""

    name: str
    base_model: str | None
    trainable: bool
    config: dict[str, Any]


@dataclass(frozen=True)
class Choice:
    """An answer in a history: the sample that it names, if any, and what stood before it."""

    sample: str | None
    message: dict[str, Any]
    before: list[dict[str, Any]]


@dataclass(frozen=True)
class Trajectory:
    """The answers of its histories, its own first; one that has no reward has None."""

    choices: list[Choice]
    reward: float | None


@dataclass(frozen=True)
class Groups:
    """Groups of trajectories, the exceptions among them by type, and how they were on average."""

    groups: list[list[Trajectory]]
    raised: Counter[str]
    means: dict[str, float]


@dataclass
class _Seen:
    """What has been read of some groups so far."""

    raised: Counter[str] = field(default_factory=Counter)
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
            groups.append([*_trajectories(one, seen)])
        except (AttributeError, TypeError, KeyError) as error:
            where = f"trajectory_groups[{number}]"
            raise ApiError(400, f"{where} is no group of trajectories", param=where) from error
    return Groups(groups, seen.raised, {name: mean(values) for name, values in seen.values.items()})


def _trajectories(group: dict[str, Any], seen: _Seen) -> Iterator[Trajectory]:
    for exception in group.get("exceptions") or ():
        words = re.findall(r"\w+", str(exception.get("type")))
        seen.raised[f"raised {words[-1] if words else 'an error'}"[:80]] += 1
        seen.values["exception_rate"].append(1.0)
    for trajectory in group["trajectories"]:
        seen.values["exception_rate"].append(0.0)
        reward = _number(trajectory.get("reward"))
        measured = [("reward", reward), *[*(trajectory.get("metrics") or {}).items()][:_METRICS]]
        for name, value in measured:
            number = _number(value)
            if number is not None and math.isfinite(number):
                seen.values[str(name)[:64]].append(number)
        histories = (trajectory, *(trajectory.get("additional_histories") or ()))
        yield Trajectory([choice for history in histories for choice in _choices(history)], reward)


def _choices(history: dict[str, Any]) -> Iterator[Choice]:
    before: list[dict[str, Any]] = []
    for entry in history.get("messages_and_choices") or ():
        message = entry.get("message")
        if not isinstance(message, dict):  # it was written
            before.append(entry)
            continue
        named = entry.get("slipway")  # LiteLLM keeps it among the fields that it does not know
        named = named or (entry.get("provider_specific_fields") or {}).get("slipway")
        sample = named.get("sample") if isinstance(named, dict) else None
        yield Choice(sample if isinstance(sample, str) and sample else None, message, [*before])
        before.append(message)


def _number(said: Any) -> float | None:
    try:
        return float(said)
    except (TypeError, ValueError, OverflowError):
        return None
