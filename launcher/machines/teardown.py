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
# How a provider is asked for the machines of one cluster: `sky_calls.instances`.
Provider = dict[str, Any]


class Teardown:
    """The end of the cluster named `run_id`, of machines with `gpus`, which may be anywhere in `infra`.

    `learned(standing)` keeps what the books say of it.
    """

    def __init__(
        self,
        run_id: str,
        gpus: str,
        infra: list[str],
        home: SkyHome,
        sky: SkyProcess,
        learned: Callable[[Standing], None],
    ) -> None:
        self._run_id = run_id
        self._gpus = gpus
        self._infra = infra
        self._home = home
        self._sky = sky
        self._learned = learned
        # Where it may be besides, with how each provider is asked.
        self._elsewhere: dict[str, Any] | None = None
        # Why the last attempt to end it failed.
        self._trouble: str | None = None

    def down(self, standing: Standing | None) -> None:
        """By name, so it also ends a launch that is under way, whoever began it; where SkyPilot cannot, at
        the provider itself. Never raises LaunchError: the proof says what is left, and why."""
        for attempt in range(_DOWN_ATTEMPTS):
            time.sleep(_POLL_SECONDS if attempt else 0)
            try:
                standing = self._learn(standing)
                self._home.serve()
                passing("cloud.downing")
                if not self._sky.call("down", DOWN_SECONDS, cluster=self._run_id)["known"]:
                    standing = self._end_unlisted(standing)
                passing("cloud.downed")
                self._end_listed(standing)
                self._trouble = None
                return
            except LaunchError as error:
                self._trouble = f"{error.message}: {error.why}"
                LOGGER.warning("ending %s failed: %s", self._run_id, self._trouble)
        # A launch it still works on would make another machine.
        self._home.end_server()
        try:
            self._end_listed(standing)
            self._trouble = None
        except LaunchError as error:
            self._trouble = f"{error.message}: {error.why}"
            LOGGER.warning("ending %s at its provider failed: %s", self._run_id, self._trouble)

    def proof(self, standing: Standing | None) -> Proof:
        """No provider's list has a machine of the cluster: SkyPilot's books alone prove nothing.

        With the proof SkyPilot's home goes.
        """
        try:
            standing = self._learn(standing)
            if standing is None:
                standing = self._last_standing()
            proof = self._ask_providers(standing)
        except LaunchError as error:
            proof = Proof(False, f"nobody says that it is gone: {error.why}; {self._look_yourself(standing)}")
        self._sky.end()
        if proof.verified:
            self._home.remove()
        return proof

    def listed(self, standing: Standing | None) -> list[str]:
        """The cluster's machines by the provider's list. Raises LaunchError where it cannot be asked."""
        if standing is None or not self._home.folder.exists():
            raise LaunchError("there is no cluster to ask for", "it is not armed, or proven to be down", None)
        ((_, found),) = self._lists([standing["provider"]])
        return found

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

    def _end_listed(self, standing: Standing | None) -> None:
        """Machines a provider still lists although SkyPilot is done with the cluster, or never knew."""
        # Whose launch was broken off may still be on its way into the provider's list.
        broken_off = standing is not None and standing["address"] is None
        settled_at = time.monotonic() + (_SETTLE_SECONDS if broken_off else 0)
        while True:
            for provider, found in self._lists(self._providers(standing)):
                if found:
                    self._sky.call("terminate", DOWN_SECONDS, provider=provider)
            if time.monotonic() >= settled_at:
                return
            time.sleep(_POLL_SECONDS)

    def _ask_providers(self, standing: Standing | None) -> Proof:
        bound = time.monotonic() + GONE_SECONDS
        asked = waiting = self._providers(standing)
        while True:
            listed = self._lists(waiting)
            # Whose list was empty once has nothing more to say: nobody is left who could make a machine.
            waiting = [provider for provider, found in listed if found]
            if not waiting:
                return Proof(True, self._nothing_listed(asked))
            if self._trouble is not None or time.monotonic() > bound:
                left = [f"{machine} ({place(provider)})" for provider, found in listed for machine in found]
                why = "" if self._trouble is None else f" ({self._trouble})"
                look = self._look_yourself(standing)
                return Proof(False, f"there still is {', '.join(left)}{why}; {look}")
            time.sleep(_POLL_SECONDS)

    def _nothing_listed(self, asked: list[Provider]) -> str:
        """What exactly is proven."""
        unasked = self._candidates()["unasked"]
        books = f"no cluster {self._run_id} is on SkyPilot's books, which it writes before it asks a provider"
        if not asked:
            return books
        names = sorted({provider["cluster_on_cloud"] for provider in asked})
        places = ", ".join(sorted({place(provider) for provider in asked}))
        proven = f"no machine of {', '.join(names)} is listed by {places}"
        without = f"; {', '.join(unasked)} cannot be asked without them: {books}" if unasked else ""
        return proven + without

    def _look_yourself(self, standing: Standing | None) -> str:
        """The provider's own command, or what to look for in its console."""
        name = f"{self._run_id}-{self._run_id.removeprefix('slip-')}"
        clouds = {place.partition("/")[0] for place in self._infra}
        where = standing["where"] if standing else "/".join(self._infra)
        if clouds == {"aws"}:
            region = standing["provider"]["config"]["region"] if standing else "REGION"
            tag = f"Name=tag:ray-cluster-name,Values={name}"
            return f"look yourself: aws ec2 describe-instances --region {region} --filters {tag}"
        return f"look yourself: {name} in the console of {where}"

    # -------------------------------------------------------------- asking

    def _providers(self, standing: Standing | None) -> list[Provider]:
        """Where the books say the cluster is, and wherever else it may have been tried."""
        asked: list[Provider] = [standing["provider"]] if standing is not None else []
        known = {place(provider) for provider in asked}
        return asked + [one for one in self._candidates()["providers"] if place(one) not in known]

    def _lists(self, providers: list[Provider]) -> list[tuple[Provider, list[str]]]:
        """What each of them lists of the cluster. Raises LaunchError when one does not answer."""
        found = self._sky.call("instances", ASK_SECONDS, providers=providers)["instances"]
        return list(zip(providers, found, strict=True))

    def _candidates(self) -> dict[str, Any]:
        if self._elsewhere is None:
            self._elsewhere = self._sky.call(
                "candidates", ASK_SECONDS, cluster=self._run_id, gpus=self._gpus, infra=self._infra
            )
        assert self._elsewhere is not None  # a call answers or raises
        return self._elsewhere

    def _learn(self, standing: Standing | None) -> Standing | None:
        """What the books say now, as long as they have it; else what they said before."""
        # Removed, by hand or with a proof that the record does not have; or made for one cloud of several.
        self._home.make()
        found = self._sky.call("standing", ASK_SECONDS, cluster=self._run_id)
        if found is None:
            return standing
        self._learned(found)
        return found


def wait_until_gone(sky: SkyProcess, provider: Provider, seconds: float) -> list[str]:
    """What a provider still lists of a cluster when so long has passed; nothing as soon as that is so."""
    bound = time.monotonic() + seconds
    while True:
        (left,) = sky.call("instances", ASK_SECONDS, providers=[provider])["instances"]
        if not left or time.monotonic() > bound:
            return left
        time.sleep(_POLL_SECONDS)


def place(provider: Provider) -> str:
    """ "AWS us-east-1", "GCP us-central1-a", "Lambda"."""
    config = provider["config"]
    zone = config.get("availability_zone") if provider["name"] == "GCP" else config.get("region")
    return f"{provider['name']} {zone}" if zone else str(provider["name"])
