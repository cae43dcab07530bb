"""The settings of a run: each key, how its text becomes a value, what it is when nobody says.

Neighbours: `config.py` fills Settings from all sources, `run.py` reads them.
Knows nothing of files, flags or the environment. The runtime's own keys are in `runtime_config.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from launcher.units import format_duration, format_money, parse_duration, parse_money

TINY_MODEL = "tiny"
WANDB_MODES = ("disabled", "offline", "online")
# The lease is renewed each quarter of it, and a look at a busy runtime may take 5 s.
LEAST_LEASE_SECONDS = 15.0
# Handed to those of the runtime's processes that need them, shown as set or not set, never with their value.
SECRETS = ("HF_TOKEN", "WANDB_API_KEY", "WANDB_ENTITY", "WANDB_BASE_URL")


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("expected some text")
    return value.strip()


def _duration(value: Any) -> float:
    return parse_duration(str(value))


def _lease(value: Any) -> float:
    seconds = _duration(value)
    if seconds < LEAST_LEASE_SECONDS:
        least = format_duration(LEAST_LEASE_SECONDS)
        raise ValueError(f"the least is {least}: it is renewed in quarters, and a busy runtime may take 5 s")
    return seconds


def _money(value: Any) -> float:
    return parse_money(str(value))


def _port(value: Any) -> int:
    number = int(str(value)) if str(value).isdecimal() else 0
    if not 1024 <= number <= 65535:
        raise ValueError("a port is a number from 1024 to 65535")
    return number


def _switch(value: Any) -> bool:
    word = str(value).strip().lower()
    if word in {"true", "1", "yes", "on"}:
        return True
    if word in {"false", "0", "no", "off"}:
        return False
    raise ValueError("expected true or false")


def _wandb(value: Any) -> str:
    if value not in WANDB_MODES:
        raise ValueError(f"expected one of {', '.join(WANDB_MODES)}")
    return str(value)


@dataclass(frozen=True)
class Setting:
    """One key of ours: how its text becomes a value and a value text, and what it is when nobody says."""

    key: str
    parse: Callable[[Any], Any]
    default: Any = None
    show: Callable[[Any], str] = str

    @property
    def variable(self) -> str:
        return variable_of(self.key)


SETTINGS: dict[str, Setting] = {
    setting.key: setting
    for setting in (
        Setting("model", _text, TINY_MODEL),
        Setting("name", _text),
        Setting("gpus", _text),
        Setting("infra", _text),
        Setting("max", _duration, show=format_duration),
        Setting("lease", _lease, 15 * 60.0, format_duration),
        Setting("budget", _money, show=format_money),
        Setting("port", _port),
        Setting("openai_env", _switch, False),
        Setting("wandb", _wandb, "disabled"),
        Setting("yes", _switch, False),
    )
}


def variable_of(key: str) -> str:
    """The environment variable of a key: `train.learning_rate` is LAUNCH_TRAIN__LEARNING_RATE."""
    return "LAUNCH_" + key.upper().replace(".", "__")


@dataclass(frozen=True)
class Value:
    """A value and where it came from, in words: "--max", "LAUNCH_MAX", "launch.toml", "default"."""

    value: Any
    source: str


@dataclass(frozen=True)
class Settings:
    """What one run was asked to be. `runtime` holds overrides of the runtime's own keys, dotted;
    `warnings` is what is wrong without being an error."""

    model: str
    name: str | None
    gpus: str | None
    infra: str | None
    max_seconds: float | None
    lease_seconds: float
    budget: float | None
    port: int | None
    openai_env: bool
    wandb: str
    yes: bool
    runtime: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Value] = field(default_factory=dict)
    secrets: dict[str, Value] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
