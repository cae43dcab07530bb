"""Keeps a run alive and knows how it is: renews the lease and asks for the status, in a thread of its own.

Neighbours: `run.py` starts it when the endpoint answers and reads `now()`; it asks through the relay, so what
it measures is what a program would meet. Knows nothing of what the answers mean for the run.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import httpx

from launcher.log import LOGGER
from launcher.safety.lease import Lease
from runtime.schema import RuntimeStatus

_ASK_EVERY_SECONDS = 1.0
# Long enough for a busy gateway, short enough that a frozen one is seen.
_ANSWER_SECONDS = 5.0


@dataclass(frozen=True)
class Beat:
    """What is known now. `silent_since`: monotonic time since when nothing answers; None while it does."""

    lease: Lease
    status: RuntimeStatus | None = None
    round_trip_seconds: float | None = None
    silent_since: float | None = None
    silence: str | None = None


class Pulse:
    """Asks `root`, the relay's address without `/v1`, until `stop`."""

    def __init__(
        self,
        root: str,
        token: str,
        lease_seconds: float,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._beat = Beat(Lease(lease_seconds, clock()))
        # trust_env: a proxy configured for the outside world must not see 127.0.0.1. verify: there is no TLS
        # on this computer, and loading certificates for none takes 0.1 s.
        self._http = httpx.Client(
            base_url=root,
            headers={"authorization": f"Bearer {token}"},
            timeout=min(_ANSWER_SECONDS, lease_seconds / 4),
            trust_env=False,
            verify=False,
        )
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)

    def start(self) -> None:
        """Renew and ask once now, so that what follows starts from a known state. Raises httpx.HTTPError."""
        self._renew()
        self._ask()
        self._thread.start()

    def stop(self) -> None:
        """No renewal after this returns."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(_ANSWER_SECONDS + 1)
        self._http.close()

    def look(self) -> None:
        """Ask once more now, so that an end is told as it was; what is known stays where nobody answers."""
        if self._beat.silent_since is None:
            with contextlib.suppress(httpx.HTTPError, ValueError):
                self._ask()

    def now(self) -> Beat:
        """The newest beat."""
        return self._beat

    def _run(self) -> None:
        while not self._over.wait(_ASK_EVERY_SECONDS):
            try:
                if self._beat.lease.due(self._clock()):
                    self._renew()
                self._ask()
            except Exception as error:  # noqa: BLE001 - if this thread ended, the lease would, unnoticed
                self._silent(error)

    def _renew(self) -> None:
        self._http.put("/slipway/lease").raise_for_status()
        self._beat = replace(self._beat, lease=self._beat.lease.renewed(self._clock()))

    def _ask(self) -> None:
        begun = self._clock()
        answer = self._http.get("/slipway/status").raise_for_status()
        took = self._clock() - begun
        status = RuntimeStatus.model_validate_json(answer.content)
        if self._beat.silent_since is not None:
            LOGGER.info("the runtime answers again after %.1f s", begun - self._beat.silent_since)
        self._beat = replace(
            self._beat, status=status, round_trip_seconds=took, silent_since=None, silence=None
        )

    def _silent(self, error: Exception) -> None:
        since = self._beat.silent_since
        if since is None:
            since = self._clock()
            LOGGER.warning("the runtime does not answer: %r", error)
        self._beat = replace(
            self._beat,
            round_trip_seconds=None,
            silent_since=since,
            silence=f"{type(error).__name__}: {error}",
        )
