"""The settings of a run: each key, its parser and its default.

Neighbours: `setting_sources.py` fills Settings from all sources, `run.py` reads them.
Knows nothing of files, flags or the environment. The runtime's own keys are in `runtime_config.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from launcher.base.suggestions import closest_match
from launcher.base.units import (
    format_duration,
    format_money,
    format_rate,
    parse_duration,
    parse_money,
    parse_rate,
)
from launcher.types.clouds import ALIASES, KNOWN_CLOUDS, SELF_HOSTED, WITHOUT_AUTODOWN

if TYPE_CHECKING:
    from launcher.types.adapter import Adapter

DEFAULT_MODEL = "tiny"
WANDB_MODES = ("disabled", "offline", "online")
# The lease is renewed each quarter of it, and a look at a busy runtime may take 5 s.
MIN_LEASE_SECONDS = 15.0
# `launch down` waits three minutes for the run's own `launch` to begin the end, which it does after this.
_MAX_GRACE_SECONDS = 120.0
# The type of GPUs that are this computer's own: `--gpus local:2` rents nothing.
LOCAL_GPUS = "local"
_GPUS = re.compile(r"([A-Za-z][\w.-]*)(?::(\d{1,4}))?", re.ASCII)
_MAX_GPUS = 1024
_SIZE = re.compile(r"(\d{1,6})\s*(?:gb?)?", re.IGNORECASE | re.ASCII)
_LEAST_DISK_GB, _MOST_DISK_GB = 50, 65536


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("expected some text")
    return value.strip()


def _duration(value: Any) -> float:
    return parse_duration(str(value))


def _lease(value: Any) -> float:
    seconds = _duration(value)
    if seconds < MIN_LEASE_SECONDS:
        least = format_duration(MIN_LEASE_SECONDS)
        raise ValueError(
            f"the minimum is {least}: it is renewed four times per lease, and a renewal may take 5 s"
        )
    return seconds


def _grace(value: Any) -> float:
    seconds = _duration(value)
    if seconds > _MAX_GRACE_SECONDS:
        most = format_duration(_MAX_GRACE_SECONDS)
        raise ValueError(f"the maximum is {most}: you pay for rented GPUs meanwhile")
    return seconds


def _money(value: Any) -> float:
    return parse_money(str(value))


def _rate(value: Any) -> float:
    """Bytes a second; infinite for "none"."""
    if str(value).strip().lower() == "none":
        return float("inf")
    return parse_rate(str(value))


def _port(value: Any) -> int:
    number = int(str(value)) if str(value).isdecimal() else 0
    if not 1024 <= number <= 65535:
        raise ValueError("a port is a number from 1024 to 65535")
    return number


def _gpus(value: Any) -> str:
    """TYPE:COUNT, or TYPE for one of it; whether there is such a type, the price catalogs know. `local`: this
    computer's own, which its driver knows."""
    found = _GPUS.fullmatch(str(value).strip())
    if found is None:
        raise ValueError(f"expected TYPE:COUNT, such as H100:4, or {LOCAL_GPUS}:1 for this computer's own")
    count = int(found[2] or 1)
    if count == 0:
        raise ValueError("at least one GPU: H100:1")
    return f"{LOCAL_GPUS if found[1].lower() == LOCAL_GPUS else found[1]}:{count}"


def _infra(value: Any) -> tuple[str, ...]:
    """Places such as `aws`, `aws/us-east-1`, `k8s/CONTEXT`, several with commas between them or as a list."""
    parts = value if isinstance(value, (list, tuple)) else str(value).split(",")
    return tuple(dict.fromkeys(_place(str(part).strip().strip("/")) for part in parts))


def _place(text: str) -> str:
    cloud, *rest = (part.strip() for part in text.split("/"))
    cloud = ALIASES.get(cloud.lower(), cloud.lower())
    if cloud in WITHOUT_AUTODOWN:
        raise ValueError(f"a machine on {cloud} cannot shut itself down, so it could be left running")
    if cloud not in KNOWN_CLOUDS:
        meant = closest_match(cloud, KNOWN_CLOUDS)
        known = f"did you mean {meant}?" if meant else f"the clouds are {', '.join(sorted(KNOWN_CLOUDS))}"
        raise ValueError(f"{cloud or 'nothing'} is not a cloud; {known}")
    if not all(rest) or (len(rest) > 2 and cloud not in SELF_HOSTED):
        raise ValueError("expected CLOUD, CLOUD/REGION or CLOUD/REGION/ZONE")
    return "/".join([cloud, *rest])


def _count(value: Any) -> int:
    text = str(value).strip()
    if not text.isdecimal() or not 1 <= int(text) <= _MAX_GPUS:
        raise ValueError(f"expected a whole number from 1 to {_MAX_GPUS}")
    return int(text)


def _gigabytes(value: Any) -> int:
    found = _SIZE.fullmatch(str(value).strip())
    if found is None or not _LEAST_DISK_GB <= int(found[1]) <= _MOST_DISK_GB:
        raise ValueError(f"expected a number of GB from {_LEAST_DISK_GB} to {_MOST_DISK_GB}, such as 200")
    return int(found[1])


def _idle(value: Any) -> float:
    seconds = _duration(value)
    if seconds % 60:
        raise ValueError("expected whole minutes, such as 10m: the machine checks once a minute")
    return seconds


def _boolean(value: Any) -> bool:
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
    """One of our keys: how it is parsed and shown, and its default."""

    key: str
    parse: Callable[[Any], Any]
    default: Any = None
    show: Callable[[Any], str] = str


SETTINGS: dict[str, Setting] = {
    setting.key: setting
    for setting in (
        Setting("model", _text, DEFAULT_MODEL),
        Setting("name", _text),
        Setting("gpus", _gpus),
        Setting("infra", _infra, (), lambda infra: ", ".join(infra) or "-"),
        Setting("train_gpus", _count),
        Setting("infer_gpus", _count),
        Setting("disk", _gigabytes, show="{} GB".format),
        Setting("max", _duration, show=format_duration),
        Setting("lease", _lease, 15 * 60.0, format_duration),
        Setting("idle", _idle, 10 * 60.0, format_duration),
        Setting("grace", _grace, 5.0, format_duration),
        Setting("copy_rate", _rate, show=format_rate),
        Setting("budget", _money, show=format_money),
        Setting("max_price", _money, show=lambda dollars: f"{format_money(dollars)}/h"),
        Setting("port", _port),
        Setting("openai_env", _boolean, False),
        Setting("arbor", _boolean, False),
        Setting("art", _boolean, False),
        Setting("keep_output", _boolean, True),
        Setting("wandb", _wandb, "disabled"),
        Setting("trackio", _boolean, False),
        Setting("yes", _boolean, False),
    )
}


def variable_of(key: str) -> str:
    """The environment variable of a key: `train.learning_rate` is LAUNCH_TRAIN__LEARNING_RATE."""
    return "LAUNCH_" + key.upper().replace(".", "__")


@dataclass(frozen=True)
class Value:
    """A value and its source, in words: "--max", "LAUNCH_MAX", "launch.toml", "default"."""

    value: Any
    source: str


@dataclass(frozen=True)
class Settings:
    """The settings of one run. `runtime` holds overrides of the runtime's own keys, dotted; `warnings` are
    problems that are no errors. If `--model` names an adapter, it is `adapter`, and `model` is its base."""

    model: str
    name: str | None
    gpus: str | None
    infra: tuple[str, ...]
    train_gpus: int | None
    infer_gpus: int | None
    disk_gb: int | None
    max_seconds: float | None
    lease_seconds: float
    idle_seconds: float
    grace_seconds: float
    copy_rate: float | None
    budget: float | None
    max_price: float | None
    port: int | None
    openai_env: bool
    arbor: bool
    art: bool
    keep_output: bool
    wandb: str
    trackio: bool
    yes: bool
    runtime: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Value] = field(default_factory=dict)
    secrets: dict[str, Value] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    adapter: Adapter | None = None

    @property
    def rented(self) -> bool:
        """Whether the run rents GPUs."""
        return self.gpus is not None and not self.own_gpus

    @property
    def own_gpus(self) -> bool:
        """Whether the run uses this computer's own GPUs."""
        return self.gpus is not None and self.gpus.startswith(f"{LOCAL_GPUS}:")
