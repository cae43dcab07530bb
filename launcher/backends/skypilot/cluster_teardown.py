"""Ends a run's cluster and proves its end by the provider's own list, not by SkyPilot's.

Neighbours: `cloud_machine.py` is the machine whose end this is, `sky_process.py` makes the calls, in
`sky_home.py`; `provider_listings.py` judges each place's answer; `standby_home.py` asks the providers if the
run's own home cannot be written. Knows nothing of the link, of results or of how a machine came up.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from launcher.backends.skypilot import os_login
from launcher.backends.skypilot.cluster_request import ClusterRequest
from launcher.backends.skypilot.provider_listings import (
    LIST_SECONDS,
    ListingResult,
    OtherAccountError,
    Provider,
    ProviderListings,
    Tried,
    place,
)
from launcher.backends.skypilot.sky_home import SkyHome
from launcher.backends.skypilot.sky_process import SkyProcess
from launcher.backends.skypilot.standby_home import StandbyHome
from launcher.base.errors import LaunchError
from launcher.base.failpoints import failpoint
from launcher.base.log import LOGGER
from launcher.types.clouds import clouds_of
from launcher.types.machine import Proof

DOWN_SECONDS = 300.0
# The provider's list may go on showing a machine that is ending.
GONE_SECONDS = 120.0
# A provider that refuses once often does not refuse twice.
_DOWN_ATTEMPTS = 2
_POLL_SECONDS = 1.0
# A request for a machine that was cut off a moment ago is carried out, and listed, within this.
_SETTLE_SECONDS = 5.0

# A cluster's last entry in SkyPilot's books; it tells how to ask the provider afterwards.
ClusterStatus = dict[str, Any]


class ClusterTeardown:
    """The end of the cluster of this request, which may be anywhere in its `infra`.

    `tried()` are the places where it was requested. `on_status(status)` saves SkyPilot's entry for it.
    `standby` is asked when nothing else here can be.
    """

    def __init__(
        self,
        order: ClusterRequest,
        tried: Tried,
        home: SkyHome,
        sky: SkyProcess,
        on_status: Callable[[ClusterStatus], None],
    ) -> None:
        self._run_id = order.cluster
        self._gpus = order.gpus
        self._infra = order.infra
        self._accounts = order.accounts
        self._verdicts = ProviderListings(order, tried)
        self._home = home
        self._sky = sky
        self._learned = on_status
        # Where it may be besides, with how each provider is asked.
        self._elsewhere: dict[str, Any] | None = None
        # Why the last attempt to end it failed.
        self._failed: Exception | None = None
        # Its owner's: it is asked here and never ended.
        self.standby: StandbyHome | None = None
        # Instead of `sky`, once the run's own home has failed.
        self._standby_home: StandbyHome | None = None
        # The last entry in the books.
        self._known: ClusterStatus | None = None

    def down(self, cluster_status: ClusterStatus | None) -> None:
        """End it by name, which also ends a launch in progress, of any process. If SkyPilot cannot, the
        provider is asked directly; if nothing can be written here, from a home in memory.

        Raises nothing: the proof tells what is left, and why.
        """
        self._known = cluster_status or self._known
        for attempt in range(_DOWN_ATTEMPTS):
            time.sleep(_POLL_SECONDS if attempt else 0)
            if self._tried("ending it by name", self._by_name):
                return
            # Another account answers, now and later.
            if isinstance(self._failed, OtherAccountError):
                break
        # A launch it still works on would make another machine.
        self._tried("ending its API server", self._sky.end_server)
        if self._tried("ending it at its provider", self._end_listed):
            return
        for standby_home in self._standby_homes():
            if isinstance(self._failed, OtherAccountError):
                return
            if self._tried(
                "ending it at its provider from a spare home", partial(self._end_from, standby_home)
            ):
                return

    def proof(self, cluster_status: ClusterStatus | None) -> Proof:
        """Prove that no provider's list has a machine of the cluster. SkyPilot's own state proves nothing.

        After the proof SkyPilot's home is removed. Raises nothing: a failure is no proof.
        """
        self._known = cluster_status or self._known
        try:
            proof = self._prove()
        except OtherAccountError as error:
            proof = _from_other_account(error)
        except Exception as error:  # noqa: BLE001 - a full disk here, or any trouble with SkyPilot
            LOGGER.warning("asking for %s failed: %s", self._run_id, _described(error))
            proof = self._prove_from_standby_home(error)
        self._clean_up(proof)
        return proof

    def _tried(self, what: str, act: Callable[[], object]) -> bool:
        """Run `act`; whether it succeeded. A failure is noted as a trouble of this teardown."""
        try:
            act()
        except Exception as error:  # noqa: BLE001 - a full disk here, or any trouble with SkyPilot
            self._failed = error
            LOGGER.warning("%s: %s failed: %s", self._run_id, what, _described(error))
            return False
        self._failed = None
        return True

    def _by_name(self) -> None:
        self._refresh_status()
        failpoint("cloud.downing")
        if not self._call_down()["known"]:
            self._end_unlisted()
        failpoint("cloud.downed")
        self._end_listed()

    def _call_down(self) -> dict[str, Any]:
        """By the API server, which ends a launch that it works at. It rests while a machine works, and is not
        waited for: once all that is left of it has ended, the process here does the same."""
        by_server = self._home.healthy()
        if not by_server:
            self._sky.end_server()
        return self._sky.call("down", DOWN_SECONDS, cluster=self._run_id, by_server=by_server)

    def _end_from(self, standby_home: Callable[[], StandbyHome]) -> None:
        self._use_standby(standby_home)
        self._end_listed()

    def _standby_homes(self) -> list[Callable[[], StandbyHome]]:
        """Standby homes from which providers can be asked, one after the other; none once all were used."""
        standby, in_memory = self.standby, partial(StandbyHome.of, self._home)
        if self._standby_home is None and standby is not None:
            return [lambda: standby, in_memory]
        return [in_memory] if self._standby_home is None or self._standby_home is standby else []

    def _use_standby(self, standby_home: Callable[[], StandbyHome]) -> None:
        """From now on ask providers from a standby home. Raises OSError if there is no room."""
        self._sky.end()
        self._standby_home = standby_home()

    def _prove(self) -> Proof:
        if self._standby_home is None:
            self._refresh_status()
            if self._known is None:
                self._final_status()
        return self._ask_providers()

    def _prove_from_standby_home(self, before: Exception) -> Proof:
        """The same proof from a standby home; if that fails too, the error names the failure `before` as
        well."""
        for standby_home in self._standby_homes():
            try:
                self._use_standby(standby_home)
                return self._prove()
            except OtherAccountError as error:
                return _from_other_account(error)
            except Exception as error:  # noqa: BLE001 - then nothing is proven
                LOGGER.warning("asking for %s from a spare home: %s", self._run_id, _described(error))
        detail = f"it is not proven that it is gone: {_described(before)}"
        return Proof(False, f"{detail}; {self._manual_check_hint()}")

    def _clean_up(self, proof: Proof) -> None:
        """End our processes, and after a proof remove the home, and its key at the provider. A failure here
        does not undo the proof."""
        standby_home = self._standby_home if self._standby_home is not self.standby else None
        keeps_keys = proof.verified and self._standby_home is None and "gcp" in clouds_of(self._infra)
        for what, act in (
            ("removing its key", partial(os_login.remove_keys, self._home) if keeps_keys else None),
            ("ending the calls", self._sky.end),
            ("removing the spare home", standby_home.remove if standby_home is not None else None),
            ("removing its home", self._home.remove if proof.verified else None),
        ):
            try:
                if act is not None:
                    act()
            except Exception as error:  # noqa: BLE001 - nothing of it is paid for
                LOGGER.warning("%s: %s failed: %s", self._run_id, what, _described(error))
        self._standby_home = None

    def listed(self, cluster_status: ClusterStatus | None) -> list[str]:
        """The cluster's machines by the provider's list. Raises LaunchError if it cannot be asked."""
        if cluster_status is None or not self._home.folder.exists():
            raise LaunchError("there is no cluster to ask for", "it is not rented yet, or already down", None)
        ((_, found),) = self._ask([cluster_status["provider"]]).complete()
        return found

    def _end_unlisted(self) -> None:
        """A launch on its way into the books, or between two zones, is not in them, and `down` leaves it."""
        if self._final_status():
            self._call_down()

    def _final_status(self) -> bool:
        """SkyPilot's entry once no process can change it: everything that works in SkyPilot's home ends
        first."""
        self._sky.end()
        self._home.end_server()
        return self._refresh_status()

    def _end_listed(self) -> None:
        """Machines a provider still lists although SkyPilot is done with the cluster, or never knew."""
        # A machine whose launch was interrupted may not be in the provider's list yet.
        broken_off = self._known is not None and self._known["address"] is None
        settled_at = time.monotonic() + (_SETTLE_SECONDS if broken_off else 0)
        while True:
            listing = self._ask(self._providers())
            for provider, found in listing.lists:
                if found:
                    self._asker.call("terminate", DOWN_SECONDS, provider=provider)
            listing.complete()
            if time.monotonic() >= settled_at:
                return
            time.sleep(_POLL_SECONDS)

    def _ask_providers(self) -> Proof:
        bound = time.monotonic() + GONE_SECONDS
        providers = waiting = self._providers()
        while True:
            listed = self._ask(waiting).complete()
            # A provider whose list was empty once is not asked again: no process is left that could make a
            # machine.
            waiting = [provider for provider, found in listed if found]
            if not waiting:
                return self._nothing_listed(providers)
            if self._failed is not None or time.monotonic() > bound:
                left = [f"{machine} ({place(provider)})" for provider, found in listed for machine in found]
                why = "" if self._failed is None else f" ({_described(self._failed)})"
                return Proof(False, f"still there: {', '.join(left)}{why}; {self._manual_check_hint()}")
            time.sleep(_POLL_SECONDS)

    def _nothing_listed(self, providers: list[Provider]) -> Proof:
        """The exact statement that is proven."""
        unasked = self._candidates()["unasked"]
        books = f"SkyPilot's records, written before it asks a provider, have no cluster {self._run_id}"
        names = sorted({provider["cluster_on_cloud"] for provider in providers})
        without = self._verdicts.without_list
        places = ", ".join(sorted({place(provider) for provider in providers} - without.keys())) or "anybody"
        proven = f"no machine of {', '.join(names)} is listed by {places}" if providers else ""
        proven += "".join(f"; {where} gives no list, but {why}" for where, why in sorted(without.items()))
        if providers and not unasked:
            return Proof(True, proven)
        if self._standby_home is not None and self._known is None:  # it has no books
            detail = "SkyPilot's records cannot be read here, and only they say which providers to ask"
            return Proof(False, f"{detail}; {self._manual_check_hint()}")
        by_books = f"; {', '.join(unasked)} could not be asked, but {books}"
        return Proof(True, proven + by_books if providers else books)

    def _manual_check_hint(self) -> str:
        """The provider's own command, or the thing to look for in its console."""
        cluster_status = self._known
        name = f"{self._run_id}-{self._run_id.removeprefix('slip-')}"
        clouds = {place.partition("/")[0] for place in self._infra}
        where = cluster_status["where"] if cluster_status else "/".join(self._infra)
        if clouds == {"aws"}:
            where = next(iter(self._verdicts.silent), "").removeprefix("AWS ")
            region = where or (cluster_status["provider"]["config"]["region"] if cluster_status else "REGION")
            tag = f"Name=tag:ray-cluster-name,Values={name}"
            return f"check yourself: aws ec2 describe-instances --region {region} --filters {tag}"
        return f"check yourself: {name} in the console of {where}"

    # -------------------------------------------------------------- asking

    @property
    def _asker(self) -> SkyProcess:
        """The process that asks the providers: it needs credentials, and no state of SkyPilot's."""
        return self._sky if self._standby_home is None else self._standby_home.sky

    def _providers(self) -> list[Provider]:
        """The place in SkyPilot's entry, and every other place where the cluster may have been tried."""
        providers: list[Provider] = [self._known["provider"]] if self._known is not None else []
        known = {place(provider) for provider in providers}
        return providers + [one for one in self._candidates()["providers"] if place(one) not in known]

    def _ask(self, providers: list[Provider]) -> ListingResult:
        """Each provider's list of the cluster's machines. A place where it was once up has to answer."""
        up = self._known is not None and self._known["address"] is not None
        certain = self._known["provider"] if self._known is not None and up else None
        return self._verdicts.ask(self._asker, providers, certain)

    def _candidates(self) -> dict[str, Any]:
        if self._elsewhere is None:
            self._elsewhere = self._asker.call(
                "candidates", LIST_SECONDS, cluster=self._run_id, gpus=self._gpus, infra=self._infra,
                accounts=self._accounts,
            )  # fmt: skip
        assert self._elsewhere is not None  # a call answers or raises
        return self._elsewhere

    def _refresh_status(self) -> bool:
        """Whether SkyPilot has an entry for it now. The entry is kept; without one, the last known entry
        stays."""
        # Removed, by hand or with a proof that the record does not have; or made for one cloud of several.
        self._home.make()
        found = self._sky.call("cluster_status", LIST_SECONDS, cluster=self._run_id)
        if found is None:
            return False
        if found != self._known:
            self._known = found
            self._save_status(found)
        return True

    def _save_status(self, found: ClusterStatus) -> None:
        """Remember the entry in this process, and in the record if it can be written."""
        try:
            self._learned(found)
        except Exception as error:  # noqa: BLE001 - a full disk, or a record that is broken
            LOGGER.warning("%s: its record cannot be written: %s", self._run_id, _described(error))


def _from_other_account(error: OtherAccountError) -> Proof:
    return Proof(False, f"it is not proven that it is gone: {_described(error)}", error.hint)


def _described(error: Exception) -> str:
    """An error in one line."""
    if isinstance(error, LaunchError):
        return f"{error.message}: {error.why}"
    return f"{type(error).__name__}: {error}"
