"""Ending a run's cluster, and the proof that nothing of it is left: by the provider's word, not SkyPilot's.

Neighbours: `cloud.py` is the machine whose end this is, `sky_process.py` makes the calls, in `sky_home.py`.
Knows nothing of the link, of results or of how a machine came up.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from launcher.errors import LaunchError
from launcher.failpoints import passing
from launcher.log import LOGGER
from launcher.machines.base import Proof
from launcher.machines.sky_home import SkyHome
from launcher.machines.sky_process import SkyProcess

DOWN_SECONDS = 300.0
ASK_SECONDS = 60.0
# The provider's list may go on showing what is ending.
GONE_SECONDS = 120.0
# A provider that refuses once often does not refuse twice.
_DOWN_ATTEMPTS = 2
_POLL_SECONDS = 1.0
# A request for a machine that was cut off a moment ago is carried out, and listed, within this.
_SETTLE_SECONDS = 5.0

# What SkyPilot's books said of a cluster while it was in them: how the provider is asked afterwards.
Standing = dict[str, Any]


class Teardown:
    """The end of the cluster named `run_id`. `learned(standing)` keeps what the books say of it."""

    def __init__(
        self, run_id: str, home: SkyHome, sky: SkyProcess, learned: Callable[[Standing], None]
    ) -> None:
        self._run_id = run_id
        self._home = home
        self._sky = sky
        self._learned = learned
        # Why the last attempt to end it failed.
        self._trouble: str | None = None

    def down(self, standing: Standing | None) -> None:
        """By name, so it also ends a launch that is under way, whoever began it. Never raises LaunchError:
        the proof says what is left, and why."""
        if not self._home.folder.exists():
            return
        for attempt in range(_DOWN_ATTEMPTS):
            try:
                self._home.serve()
                standing = self._learn(standing)
                passing("cloud.downing")
                if not self._sky.call("down", DOWN_SECONDS, cluster=self._run_id)["known"]:
                    standing = self._end_unlisted(standing)
                passing("cloud.downed")
                self._end_forgotten(standing)
                self._trouble = None
                return
            except LaunchError as error:
                self._trouble = f"{error.message}: {error.why}"
                LOGGER.warning("ending %s failed: %s", self._run_id, self._trouble)
                time.sleep(_POLL_SECONDS if attempt + 1 < _DOWN_ATTEMPTS else 0)

    def proof(self, standing: Standing | None) -> Proof:
        """The provider's own list has no machine of the cluster: SkyPilot's books alone prove nothing.

        With the proof SkyPilot's home goes.
        """
        if not self._home.folder.exists():
            return Proof(True, "nothing had been asked of a provider")
        try:
            standing = self._learn(standing)
            if standing is None:
                standing = self._last_standing()
            proof = self._ask_provider(standing)
        except LaunchError as error:
            self._sky.end()
            return Proof(False, f"{error.message}: {error.why}")
        self._sky.end()
        if proof.verified:
            self._home.remove()
        return proof

    def listed(self, standing: Standing | None) -> list[str]:
        """The cluster's machines by the provider's list. Raises LaunchError where it cannot be asked."""
        if standing is None:
            raise LaunchError("there is no cluster to ask for", "it is not armed", None)
        return self._sky.call("instances", ASK_SECONDS, provider=standing["provider"])["instances"]

    def _end_unlisted(self, standing: Standing | None) -> Standing | None:
        """A launch on its way into the books, or between two zones, is not in them, and `down` leaves it."""
        found = self._last_standing()
        if found is None:
            return standing
        self._home.serve()
        self._sky.call("down", DOWN_SECONDS, cluster=self._run_id)
        return found

    def _last_standing(self) -> Standing | None:
        """What the books say when nobody is left who could write into them: whatever works in SkyPilot's
        home ends first."""
        self._sky.end()
        self._home.end_server()
        return self._learn(None)

    def _end_forgotten(self, standing: Standing | None) -> None:
        """Machines the provider still lists although SkyPilot is done with the cluster, or never knew."""
        if standing is None:
            return
        provider = standing["provider"]
        # Whose launch was broken off may still be on its way into the provider's list.
        settled_at = time.monotonic() + (_SETTLE_SECONDS if standing["address"] is None else 0)
        while True:
            if self._sky.call("instances", ASK_SECONDS, provider=provider)["instances"]:
                self._sky.call("terminate", DOWN_SECONDS, provider=provider)
            if time.monotonic() >= settled_at:
                return
            time.sleep(_POLL_SECONDS)

    def _ask_provider(self, standing: Standing | None) -> Proof:
        if standing is None:
            # SkyPilot writes a cluster into its books before it asks a provider for a machine.
            return Proof(True, f"no cluster {self._run_id} came up, none is on SkyPilot's books")
        provider = standing["provider"]
        bound = time.monotonic() + GONE_SECONDS
        while True:
            left = self._sky.call("instances", ASK_SECONDS, provider=provider)["instances"]
            if not left:
                return Proof(True, f"{provider['name']} lists no machine of {provider['cluster_on_cloud']}")
            if self._trouble is not None or time.monotonic() > bound:
                why = "" if self._trouble is None else f" ({self._trouble})"
                return Proof(False, f"{provider['name']} still lists {', '.join(left)}{why}")
            time.sleep(_POLL_SECONDS)

    def _learn(self, standing: Standing | None) -> Standing | None:
        """What the books say now, as long as they have it; else what they said before."""
        found = self._sky.call("standing", ASK_SECONDS, cluster=self._run_id)
        if found is None:
            return standing
        self._learned(found)
        return found
