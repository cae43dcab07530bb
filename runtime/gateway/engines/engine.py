"""One engine in the gateway: its client, whether it may be used, its load.

Neighbours: engine_pool.py has all of them, router.py chooses between them. Knows nothing of versions.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.gateway.engines.engine_client import EngineClient
from runtime.gateway.engines.prefix_cache import NO_CACHE_USE, CacheUse


@dataclass(eq=False)
class Engine:
    """One engine. `process` is its pid by the supervisor's word: another pid is another, empty engine."""

    name: str
    client: EngineClient
    ready: bool = False
    process: int | None = None
    in_flight: int = 0
    cache: CacheUse = NO_CACHE_USE
