"""Asks the provider now and then whether an unreachable machine still exists.

Neighbours: `cloud_machine.py` asks when ssh to it fails, `cluster_teardown.py` has the provider's list. A
laptop that slept, or a link that is down, is no reason to give a machine up. Knows nothing of ssh.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from launcher.base.errors import JobFailed, LaunchError
from launcher.base.log import LOGGER

# A call takes seconds, and its caller waits for it.
_POLL_SECONDS = 20.0
# A provider's list may miss a machine once.
_SURE_SECONDS = 2.0


class MachinePresence:
    """The machine of the run `run_id`; `listed()` are its instances that the provider lists."""

    def __init__(self, run_id: str, listed: Callable[[], list[str]]) -> None:
        self._run_id = run_id
        self._listed = listed
        self._gone = False
        self._polled_at: float | None = None

    def is_gone(self) -> bool:
        """Whether the provider reported that it no longer exists; False if it cannot be asked."""
        now = time.monotonic()
        if self._gone or (self._polled_at is not None and now - self._polled_at < _POLL_SECONDS):
            return self._gone
        try:
            self._gone = not self._listed() and not self._listed_later()
        except LaunchError as error:
            LOGGER.warning("whether the machine is there is not known: %s (%s)", error.message, error.why)
        self._polled_at = time.monotonic()
        return self._gone

    def raise_if_gone(self) -> None:
        """Raises JobFailed when it is gone."""
        if self.is_gone():
            raise JobFailed(
                "the machine is gone",
                "its provider no longer lists it: it was reclaimed, shut itself down, or someone ended it",
                f"launch --resume {self._run_id}  # from the newest step copied to this computer",
            )

    def _listed_later(self) -> list[str]:
        time.sleep(_SURE_SECONDS)
        return self._listed()
