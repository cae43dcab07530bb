"""The runtime's own settings as dotted keys: which exist, their defaults, and building the whole.

Neighbours: `config.py` collects overrides, `run.py` builds the RuntimeConfig a machine serves.
Knows nothing of files, flags or the environment. Imports pydantic (0.25 s), so import it late.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ValidationError

from runtime.schema import RuntimeConfig

# What `launch` decides itself, from its own options and from the machine.
OURS = frozenset(
    {
        "run_id",
        "model_path",
        "served_name",
        "device",
        "state_dir",
        "socket_dir",
        "lease_seconds",
        "deadline_seconds",
        "wandb_mode",
    }
)


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
        if name in OURS:
            continue
        keys.update(_flatten(name, field.get_default()))
    return keys


def build(overrides: dict[str, Any], **ours: Any) -> RuntimeConfig:
    """The configuration of one run. Raises InvalidSettingError for the first value that does not fit."""
    nested: dict[str, Any] = dict(ours)
    for key, value in overrides.items():
        *rooms, last = key.split(".")
        place = nested
        for room in rooms:
            place = place.setdefault(room, {})
        place[last] = value
    try:
        return RuntimeConfig.model_validate(nested)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        reason = first["msg"][0].lower() + first["msg"][1:]
        raise InvalidSettingError(".".join(str(part) for part in first["loc"]), reason) from None


def check(overrides: dict[str, Any]) -> None:
    """Raise InvalidSettingError if a run with these overrides could not be configured."""
    build(overrides, run_id="check", model_path="check", state_dir="check", socket_dir="check")


def _flatten(prefix: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, BaseModel):
        return {prefix: value}
    keys: dict[str, Any] = {}
    for name in type(value).model_fields:
        keys.update(_flatten(f"{prefix}.{name}", getattr(value, name)))
    return keys
