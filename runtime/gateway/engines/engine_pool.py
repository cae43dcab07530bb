"""All engines: knows which are up, chooses one for a request, and loads the versions that a restarted one
lacks.

Neighbours: engine_client.py talks to one engine; router.py chooses between those that are ready;
version_check.py stages adapters; the supervisor restarts engines, this only notices. An engine is used when
it is healthy and has the versions that are in use.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable

from runtime.gateway.engines.engine import Engine
from runtime.gateway.engines.engine_client import EngineClient, EngineError
from runtime.gateway.engines.router import Router, RoutingKey
from runtime.gateway.engines.version_check import VerificationError
from runtime.gateway.http.openai_errors import ApiError, not_ready
from runtime.shared.process_status import SupervisorStatus

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5
# The interval at which an engine is asked for its prefix cache's use.
_CACHE_SECONDS = 5.0
_RELOAD_PAUSE_SECONDS = 5.0
# How long a request waits for an engine that died to come back: longer than a restart takes.
WAIT_SECONDS = 120.0


# Loads a version on these engines, and returns whether that took any time (reload.py).
Reload = Callable[[int, list[EngineClient]], Awaitable[bool]]


class EnginePool:
    """All engines. `reload_after_restart` loads the versions that a fresh engine lacks,
    `reload_on_demand` a version that a request names."""

    def __init__(
        self,
        clients: list[EngineClient],
        supervisor_status: SupervisorStatus,
        reload_after_restart: Callable[[EngineClient], Awaitable[None]],
        reload_on_demand: Reload,
    ) -> None:
        self.engines = [Engine(f"engine-{index}", client) for index, client in enumerate(clients)]
        self._supervisor_status = supervisor_status
        self._reload_after_restart = reload_after_restart
        self._reload_on_demand = reload_on_demand
        self._changed = asyncio.Event()
        self.router = Router()
        self.was_ready = False

    @property
    def all_ready(self) -> bool:
        return all(engine.ready for engine in self.engines)

    async def watch(self) -> None:
        """Look after every engine, for ever."""
        await asyncio.gather(*(self._watch(engine) for engine in self.engines))

    async def pick(
        self, version: int = 0, key: RoutingKey | None = None, excluded: Engine | None = None
    ) -> Engine:
        """A ready engine, once the engines have the version: the one whose cache has the prefix of `key`
        (router.py), else the least busy. Not `excluded`, which has just failed, if there is another.

        Waits, bounded, when all are away. Raises ApiError.
        """
        end = time.monotonic() + WAIT_SECONDS
        while True:
            ready = [engine for engine in self.engines if engine.ready]
            if ready and not await self._fetch(version, ready):
                others = [engine for engine in ready if engine is not excluded] or ready
                if key is None or len(self.engines) == 1:
                    return min(others, key=lambda engine: engine.in_flight)
                return self.router.choose(others, version, key)
            if time.monotonic() > end:
                raise not_ready(f"no engine was ready again within {WAIT_SECONDS:.0f} s")
            if not ready:
                await self._wait_for_engine()

    async def _wait_for_engine(self) -> None:
        """Or until it is time to look again. Raises ApiError if none can be hoped for."""
        self._raise_if_failed_for_good()
        self._changed.clear()
        with_time_out = asyncio.wait_for(self._changed.wait(), POLL_SECONDS)
        await asyncio.gather(with_time_out, return_exceptions=True)

    async def _fetch(self, version: int, ready: list[Engine]) -> bool:
        """Whether the version was missing: it may be there now, and the engines must be looked at again."""
        try:
            return await self._reload_on_demand(version, [engine.client for engine in ready])
        except VerificationError as error:
            if await self.check_all():  # which proves nothing about the version
                return True
            message = f"it was loaded again, but its weights could not be verified: {error}"
            log.error("a version that is named: %s", message)
            raise ApiError(503, message, param="model", code="version_not_proven") from error

    @property
    def prefix_cache_hits(self) -> float | None:
        """The share of prompt tokens found in the prefix caches since the engines started; None: none was
        looked up."""
        looked_for = sum(engine.cache.looked_for for engine in self.engines)
        return sum(engine.cache.found for engine in self.engines) / looked_for if looked_for else None

    async def until_all_ready(self, bound_seconds: float) -> bool:
        """Whether every engine is ready within the bound; not waited for when one has failed for good."""
        end = time.monotonic() + bound_seconds
        while not self.all_ready:
            failed = any(
                self._supervisor_status.child(one.name).get("state") == "failed" for one in self.engines
            )
            if failed or time.monotonic() > end:
                return False
            await asyncio.sleep(0.05)
        return True

    async def check_all(self) -> bool:
        """Look at every engine now; whether one was not well."""
        well = await asyncio.gather(*(engine.client.health() for engine in self.engines))
        for engine, is_well in zip(self.engines, well, strict=True):
            if not is_well:
                self.mark_unreachable(engine)
        return not all(well)

    def mark_unreachable(self, engine: Engine) -> None:
        """A connection to it broke: no request goes there until its next check."""
        if engine.ready:
            log.warning("%s: connection lost", engine.name)
        engine.ready = False

    def _raise_if_failed_for_good(self) -> None:
        phase = self._supervisor_status.supervisor().get("phase", "starting")
        states = [self._supervisor_status.child(engine.name) for engine in self.engines]
        if states and all(state.get("state") == "failed" for state in states):
            raise ApiError(503, f"the engine failed: {states[0].get('detail')}", code="engine_failed")
        if not self.was_ready:
            raise not_ready(f"the runtime is {phase}: the engines are loading")

    async def _watch(self, engine: Engine) -> None:
        looked_at = -math.inf
        while True:
            process = self._supervisor_status.child(engine.name).get("pid")
            if engine.ready and process != engine.process:
                self.mark_unreachable(engine)
            if not engine.ready and await engine.client.health():
                await self._bring_back(engine, process)
            if engine.ready and time.monotonic() - looked_at > _CACHE_SECONDS:
                looked_at = time.monotonic()
                with contextlib.suppress(EngineError):
                    engine.cache = await engine.client.cache_use()
            await asyncio.sleep(POLL_SECONDS)

    async def _bring_back(self, engine: Engine, process: int | None) -> None:
        try:
            await self._reload_after_restart(engine.client)
        except Exception as error:  # noqa: BLE001 - after any error the engine stays out and is tried again
            log.warning("%s: not restaged: %s", engine.name, error)
            await asyncio.sleep(_RELOAD_PAUSE_SECONDS)
            return
        log.info("%s: ready", engine.name)
        if engine.process != process:
            self.router.forget_engine(engine)
        engine.process = process
        engine.ready = self.was_ready = True
        self._changed.set()
