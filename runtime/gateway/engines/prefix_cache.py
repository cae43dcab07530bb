"""The use of an engine's prefix cache, by vLLM's own counters.

Neighbours: engine_client.py asks for them, engine_pool.py adds them up for the status. Pure.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_COUNTER = re.compile(r"^vllm:prefix_cache_(queries|hits)_total\{[^}]*\} ([0-9.e+]+)", re.MULTILINE)


class CacheUse(NamedTuple):
    """Tokens of prompts since the engine started: those looked up, and those of them found."""

    looked_for: int
    found: int


NO_CACHE_USE = CacheUse(0, 0)


def read(metrics: str) -> CacheUse:
    """Read the counters from an engine's `/metrics`."""
    totals = {"queries": 0.0, "hits": 0.0}
    for name, value in _COUNTER.findall(metrics):
        totals[name] += float(value)
    return CacheUse(int(totals["queries"]), int(totals["hits"]))
