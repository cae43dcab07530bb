"""Shapes of common models that come with the package: a plan for them needs no network.

Neighbours: `model_config.py` asks here for models that are not on this computer. `known_models.json` has the
source and date of each shape. Reads that file alone.
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

from launcher.base.suggestions import closest_match as closest

_MIN_SIMILARITY = 0.75
_NUMBER = re.compile(r"\d+")
_FILE = Path(__file__).parent / "known_models.json"


def config_of(model: str) -> dict[str, Any] | None:
    """The keys of its config.json that decide its shape; None for a model that is not in the table."""
    return _by_name().get(model.lower())


def closest_model(model: str) -> str | None:
    """The name in the table closest to an unknown one, with its owner or without; else None.

    Names of a family are alike, so all numbers must be equal: Qwen3-2B is not Qwen3-32B.
    """
    table = _table()["models"].items()
    named = {name.lower(): name for first, entry in table for name in (first, *entry["also"])}
    if model.lower() in named:
        return None
    if "/" not in model:
        named = {name.rpartition("/")[2]: full for name, full in named.items()}
    numbers = _NUMBER.findall(model)
    alike = [name for name in named if _NUMBER.findall(name) == numbers]
    meant = closest(model.lower(), alike, _MIN_SIMILARITY)
    return None if meant is None else named[meant]


def table_date() -> str:
    """The day (ISO) on which the table was put together."""
    return _table()["read"]


@functools.cache
def _table() -> dict[str, Any]:
    return json.loads(_FILE.read_text(encoding="utf-8"))


@functools.cache
def _by_name() -> dict[str, dict[str, Any]]:
    """The hub takes names in any case."""
    models: dict[str, Any] = _table()["models"]
    return {
        name.lower(): entry["config"] for first, entry in models.items() for name in (first, *entry["also"])
    }
