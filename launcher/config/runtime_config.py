"""The runtime's own settings as dotted keys: lists them with their defaults, and checks their values.

Neighbours: `setting_sources.py` collects overrides, `run.py` makes the RuntimeConfig that a machine serves.
Errors are in our words, not pydantic's. Knows nothing of files, flags or the environment. Imports pydantic
(0.25 s), so import it late.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from runtime.shared.runtime_config import RuntimeConfig
from runtime.shared.train_config import COMBINATION, first_error

# Settings that `launch` decides itself, from its own options and from the machine.
LAUNCHER_KEYS = frozenset(
    {
        "run_id",
        "model_path",
        "model_name",
        "served_name",
        "device",
        "state_dir",
        "socket_dir",
        "lease_seconds",
        "deadline_seconds",
        "wandb_mode",
        "wandb_name",
    }
)


_NOUNS = {bool: "true or false", int: "a whole number", float: "a number", str: "some text"}
_LIMITS = ("ge", "gt", "le", "lt")


class InvalidSettingError(ValueError):
    """One key whose value the runtime would refuse."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(f"{key}: {reason}")
        self.key = key
        self.reason = reason


def defaults() -> dict[str, Any]:
    """Every key a user may set, dotted, with its default: {"train.learning_rate": 2e-5, …}."""
    keys: dict[str, Any] = {}
    for name, field in RuntimeConfig.model_fields.items():
        if name in LAUNCHER_KEYS:
            continue
        keys.update(_flatten(name, field.get_default()))
    return keys


def build(overrides: dict[str, Any], **ours: Any) -> RuntimeConfig:
    """The configuration with these values. Raises InvalidSettingError for the first that does not fit."""
    for key, value in overrides.items():
        if _not_finite(value):
            raise InvalidSettingError(key, _expected(key) or "expected a finite number")
    try:
        return RuntimeConfig.model_validate(overrides | ours)
    except ValidationError as error:
        key, kind, why = first_error(error)
        raise InvalidSettingError(key, _explain(key, kind, why)) from None


def _not_finite(value: Any) -> bool:
    """inf and nan pass as numbers, and no setting of the runtime means them."""
    try:
        return not math.isfinite(float(value))
    except (TypeError, ValueError):
        return False


def _explain(key: str, kind: str, message: str) -> str:
    """The runtime's expectation for a key; pydantic's own words if the key has no range."""
    expected = None if kind in ("value_error", COMBINATION) else _expected(key)
    text = message.removeprefix("value error, ")
    return expected or text[0].lower() + text[1:]


def _expected(key: str) -> str | None:
    """Such as "expected a whole number from 1 to 256"; None for a key of another kind."""
    room: type[BaseModel] = RuntimeConfig
    *rooms, last = key.split(".")
    for name in rooms:
        found = room.model_fields[name].annotation if name in room.model_fields else None
        if not (isinstance(found, type) and issubclass(found, BaseModel)):
            return None
        room = found
    field = room.model_fields.get(last)
    if field is None:
        return None
    options = [field.annotation, *get_args(field.annotation)]
    options += [word for option in options[1:] for word in get_args(option)]
    none = " or none" if type(None) in options else ""
    for kind, noun in _NOUNS.items():
        if kind in options:
            return f"expected {noun}{_range(field.metadata)}{none}"
    words = [word for word in options if isinstance(word, str)]
    return f"expected one of {', '.join(words)}{none}" if words else None


def _range(bounds: Iterable[Any]) -> str:
    """The bounds of a number in words: " from 1 to 256", " above 0", " of 2 or more"."""
    limits = {name: getattr(bound, name) for bound in bounds for name in _LIMITS if hasattr(bound, name)}
    match limits:
        case {"ge": least, "le": most}:
            return f" from {least} to {most}"
        case {"gt": above, "le": most}:
            return f" above {above}, at most {most}"
        case {"ge": least}:
            return f" of {least} or more"
        case {"gt": above}:
            return f" above {above}"
        case {"le": most}:
            return f" of at most {most}"
    return ""


def user_values(overrides: dict[str, Any]) -> RuntimeConfig:
    """The typed values of a user's overrides, before there is a run. The run's own folders are placeholders.

    Raises InvalidSettingError if a run with them could not be configured.
    """
    return build(overrides, run_id="none", model_path="none", state_dir="none", socket_dir="none")


def _flatten(prefix: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, BaseModel):
        return {prefix: value}
    keys: dict[str, Any] = {}
    for name in type(value).model_fields:
        keys.update(_flatten(f"{prefix}.{name}", getattr(value, name)))
    return keys
