"""The shapes of some models that people name, which come with the package: a plan needs no network for them.

Neighbours: `model_config.py` asks here for what is not on this computer. `known_models.json` says where each
was read and when. Reads that file alone.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

_FILE = Path(__file__).parent / "known_models.json"


def config_of(model: str) -> dict[str, Any] | None:
    """The keys of its config.json that decide its shape; None for a model that is not in the table."""
    return _by_name().get(model.lower())


def read_on() -> str:
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
