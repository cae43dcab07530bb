"""Monitors the runtime in a thread of its own: renews the lease and polls the status.

Neighbours: `run.py` starts it when the endpoint answers and reads `now()`; it asks through the relay, so its
times are those of a program's requests. Knows nothing of the answers' meaning for the run.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import httpx

from launcher.base import clock
from launcher.base.errors import JobFailed
from launcher.base.log import LOGGER
from launcher.records.lease import Lease
from runtime.shared.statuses import RuntimeStatus

_POLL_SECONDS = 1.0
# Long enough for a busy gateway, short enough that a frozen one is seen.
_ANSWER_SECONDS = 5.0
# The first answer is waited for longer and longer: a runtime that takes twice as long each time is slow, not
# gone.
_MAX_ANSWER_SECONDS = 60.0
_RETRY_SECONDS = 0.5


@dataclass(frozen=True)
class RuntimeSnapshot:
    """The runtime's state as last seen. `silent_since`: `time.monotonic()` since when nothing answers;
    None while it answers. The lease is on the clock that counts sleep."""

    lease: Lease
    status: RuntimeStatus | None = None
    round_trip_seconds: float | None = None
    silent_since: float | None = None
    silence: str | None = None


class RuntimeMonitor:
    """Polls `root`, the relay's address without `/v1`, until `stop`. `hint`: the user's remedy if there is no
    answer."""

    def __init__(
        self,
        root: str,
        token: str,
        lease_seconds: float,
        hint: str | None = None,
    ) -> None:
        self._hint = hint
        self._snapshot = RuntimeSnapshot(Lease(lease_seconds, clock.boot_seconds()))
        # trust_env: a proxy configured for the outside world must not see 127.0.0.1. verify: there is no TLS
        # on this computer, and loading certificates for none takes 0.1 s.
        self._http = httpx.Client(
            base_url=root,
            headers={"authorization": f"Bearer {token}"},
            timeout=self._usual_seconds(lease_seconds),
            trust_env=False,
            verify=False,
        )
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)

    @staticmethod
    def _usual_seconds(lease_seconds: float) -> float:
        return min(_ANSWER_SECONDS, lease_seconds / 4)

    def start(
        self,
        timeout_budget_seconds: float,
        ended: Callable[[], str | None] = lambda: None,
        progress: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Renew and poll until there is an answer, so that the run continues from a known state.

        `ended`: the reason the runtime is gone, None while it runs. Raises JobFailed when it is gone, when it
        refuses us, or after the whole timeout budget without an answer.
        """
        bound = time.monotonic() + timeout_budget_seconds
        wait_seconds = self._usual_seconds(self._snapshot.lease.seconds)
        while not self._first(wait_seconds):
            why = self._snapshot.silence or ""
            progress(f"no answer yet ({why})")
            if reason := ended():
                raise JobFailed("the runtime ended by itself", reason, self._hint)
            left = bound - time.monotonic()
            if left <= 0:
                what = f"the runtime has not answered for {timeout_budget_seconds:.0f} s"
                raise JobFailed(what, why, self._hint)
            wait_seconds = min(2 * wait_seconds, _MAX_ANSWER_SECONDS, max(left, _RETRY_SECONDS))
            time.sleep(min(_RETRY_SECONDS, left))
        self._thread.start()

    def _first(self, wait_seconds: float) -> bool:
        """Whether there is an answer within `wait_seconds`. Raises JobFailed for an answer that will not
        change by waiting."""
        try:
            self._renew(wait_seconds)
            self._ask(wait_seconds)
        except httpx.HTTPStatusError as error:
            if error.response.is_client_error:
                raise JobFailed("the runtime rejects its own launch", str(error), self._hint) from error
            self._record_silence(error)
        except (httpx.HTTPError, ValueError) as error:
            self._record_silence(error)
        else:
            return True
        return False

    def stop(self) -> None:
        """No renewal after this returns."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(_ANSWER_SECONDS + 1)
        self._http.close()

    def poll_now(self) -> None:
        """Poll once more, for the summary; without an answer the last state stays."""
        if self._snapshot.silent_since is None:
            with contextlib.suppress(httpx.HTTPError, ValueError):
                self._ask()

    def latest(self) -> RuntimeSnapshot:
        """The newest snapshot."""
        return self._snapshot

    def _run(self) -> None:
        while not self._over.wait(_POLL_SECONDS):
            try:
                if self._snapshot.lease.due(clock.boot_seconds()):
                    self._renew()
                self._ask()
            except Exception as error:  # noqa: BLE001 - if this thread ended, the lease would, unnoticed
                self._record_silence(error)

    def _renew(self, wait_seconds: float | None = None) -> None:
        self._http.put("/slipway/lease", timeout=self._timeout(wait_seconds)).raise_for_status()
        self._snapshot = replace(self._snapshot, lease=self._snapshot.lease.renewed(clock.boot_seconds()))

    def _ask(self, wait_seconds: float | None = None) -> None:
        begun = time.monotonic()
        answer = self._http.get("/slipway/status", timeout=self._timeout(wait_seconds)).raise_for_status()
        took = time.monotonic() - begun
        status = RuntimeStatus.model_validate_json(answer.content)
        if self._snapshot.silent_since is not None:
            LOGGER.info("the runtime answers again after %.1f s", begun - self._snapshot.silent_since)
        self._snapshot = replace(
            self._snapshot, status=status, round_trip_seconds=took, silent_since=None, silence=None
        )

    def _timeout(self, seconds: float | None) -> httpx.Timeout:
        return self._http.timeout if seconds is None else httpx.Timeout(seconds)

    def _record_silence(self, error: Exception) -> None:
        since = self._snapshot.silent_since
        if since is None:
            since = time.monotonic()
            LOGGER.warning("the runtime does not answer: %r", error)
        self._snapshot = replace(
            self._snapshot,
            round_trip_seconds=None,
            silent_since=since,
            silence=f"{type(error).__name__}: {error}",
        )
