"""Asks each provider which machines of a cluster it lists, and decides whether a missing answer counts as an
empty list.

Only the account in which the cluster was requested counts. An answer from another or an unknown account
counts as no answer. A place that cannot be asked counts as empty if the cluster was never tried there, or if
a policy denies the account the list and this very cluster's request, both now and when it was tried. Any
other place has to answer: its silence proves nothing.
Neighbours: `cluster_teardown.py` ends and proves by these, `sky_providers.py` asks for the lists,
`sky_aws_permissions.py` makes the request; `cluster_request.py` has the request. Knows nothing of SkyPilot's
books.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from launcher.backends.skypilot.cluster_request import ClusterRequest
from launcher.backends.skypilot.sky_process import SkyProcess
from launcher.base.errors import LaunchError

LIST_SECONDS = 60.0
_POLL_SECONDS = 1.0

_KEYS = (
    "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_ROLE_ARN",
)  # fmt: skip

# How a provider is asked for the machines of one cluster: `sky_providers.instances`.
Provider = dict[str, Any]
# The places that were asked for the cluster, as "aws/us-east-1" or "gcp".
Tried = Callable[[], list[str]]


class OtherAccountError(LaunchError):
    """The answer comes from another account than the one the cluster was requested in."""

    def __init__(self, cluster: str, where: str, own: dict[str, Any], now: dict[str, Any]) -> None:
        named = f" (profile {own['profile']})" if own["profile"] is not None else ""
        super().__init__(
            f"{where} was asked with the credentials of another account",
            f"{cluster} was launched in account {own['id']}{named}, and account {now['id']} answers now",
            _own_account_hint(cluster, own, now),
        )


def _own_account_hint(cluster: str, own: dict[str, Any], now: dict[str, Any]) -> str:
    """The command with the cluster's own profile, unless that profile leads to another account by now."""
    again, profile = f"launch down {cluster}", own["profile"]
    if profile is None or profile == now["profile"]:
        return f"{again}  # once the credentials here are those of account {own['id']}"
    # Credentials in variables take precedence over a profile.
    keys = [f"-u {name}" for name in _KEYS if name in os.environ]
    without = f"env {' '.join(keys)} " if keys else ""
    return f"{without}AWS_PROFILE={shlex.quote(profile)} {again}"


@dataclass(frozen=True)
class ListingResult:
    """Each place with its list; `silent`: the places that had to answer and did not, with reasons."""

    lists: list[tuple[Provider, list[str]]]
    silent: dict[str, str] = field(default_factory=dict)
    # That another account has answered in the place of all of these.
    other_account: OtherAccountError | None = None

    def complete(self) -> list[tuple[Provider, list[str]]]:
        """The lists. Raises LaunchError if a required one is missing."""
        if self.other_account is not None:
            raise self.other_account
        if self.silent:
            places = ", ".join(self.silent)
            raise LaunchError(f"{places} did not list its machines", next(iter(self.silent.values())), None)
        return self.lists


class ProviderListings:
    """The listings for one cluster request."""

    def __init__(self, order: ClusterRequest, tried: Tried) -> None:
        self._order = order
        self._tried = tried
        # Places that had machines of the cluster on a list, also if a later answer lacks them.
        self._had: set[str] = set()
        # Those that count as empty without a list, with why.
        self.without_list: dict[str, str] = {}
        # Those that had to answer and did not, the last time.
        self.silent: dict[str, str] = {}

    def ask(
        self, sky: SkyProcess, providers: list[Provider], certain: Provider | None = None
    ) -> ListingResult:
        """The current lists. `certain`: places where it is known to have been. Raises LaunchError when
        nothing can be asked."""
        answer = sky.call("instances", LIST_SECONDS, providers=providers, accounts=self._order.accounts)
        lists: list[tuple[Provider, list[str]]] = []
        silent: dict[str, str] = {}
        strangers: dict[str, OtherAccountError] = {}
        whys = zip(answer["refused"], answer["denied"], answer["others"], strict=True)
        for provider, listed, (why, denied, other) in zip(providers, answer["instances"], whys, strict=True):
            where = place(provider)
            found = listed if other is None else None
            if found:
                self._had.add(where)
            if found is None and not self._counts_as_empty(sky, provider, certain, denied and other is None):
                silent[where] = str(why)
                if other is not None and other["id"] is None:
                    silent[where] = "the account that answered is unknown"
                elif other is not None:
                    own = self._order.accounts[str(provider["name"]).lower()]
                    strangers[where] = OtherAccountError(self._order.cluster, where, own, other)
                    silent[where] = str(strangers[where].why)
            else:
                lists.append((provider, found or []))
        self.silent = silent
        only_strangers = silent.keys() == strangers.keys()
        return ListingResult(lists, silent, next(iter(strangers.values()), None) if only_strangers else None)

    def _counts_as_empty(
        self, sky: SkyProcess, provider: Provider, certain: Provider | None, denied: bool
    ) -> bool:
        where = place(provider)
        if where in self._had or (certain is not None and where == place(certain)):
            return False
        if where in self.without_list:
            return True
        if not self._was_tried(provider):
            self.without_list[where] = "no machine was ever asked for there"
            return True
        # A machine that was requested there, and not refused then, may exist: a later refusal does not
        # disprove it.
        if not denied or any(_is_at(provider, one) for one in self._order.unsure):
            return False
        if provider["name"] == "AWS" and self._refused(sky, provider["config"]["region"]):
            self.without_list[where] = "the account may not have this machine there"
            return True
        return False

    def _was_tried(self, provider: Provider) -> bool:
        return any(_is_at(provider, one) for one in self._tried())

    def _refused(self, sky: SkyProcess, region: str) -> bool:
        try:
            return find_rent_refusal(sky, self._order, region) is not None
        except LaunchError:  # then its list is missing, and the others' count all the same
            return False


def find_rent_refusal(sky: SkyProcess, order: ClusterRequest, region: str) -> str | None:
    """AWS's error if the account may not have this machine in a region; None if that is not certain.
    Raises LaunchError."""
    request = {"gpus": order.gpus, "disk_gb": order.disk_gb, "labels": order.labels}
    return sky.call("rent_refused", LIST_SECONDS, cluster=order.cluster, region=region, **request)["refused"]


def wait_until_gone(sky: SkyProcess, provider: Provider, seconds: float) -> list[str]:
    """The machines a provider still lists after `seconds`; returns early once there are none. Raises
    LaunchError if it gives no list."""
    bound = time.monotonic() + seconds
    while True:
        answer = sky.call("instances", LIST_SECONDS, providers=[provider])
        (left,) = answer["instances"]
        if left is None:
            raise LaunchError(f"{place(provider)} did not list its machines", answer["refused"][0], None)
        if not left or time.monotonic() > bound:
            return left
        time.sleep(_POLL_SECONDS)


def place(provider: Provider) -> str:
    """ "AWS us-east-1", "GCP us-central1-a", "Lambda"."""
    zone = _where(provider)
    return f"{provider['name']} {zone}" if zone else str(provider["name"])


def _where(provider: Provider) -> str | None:
    config = provider["config"]
    return config.get("availability_zone") if provider["name"] == "GCP" else config.get("region")


def _is_at(provider: Provider, tried: str) -> bool:
    """Whether a provider's list covers a place CLOUD, CLOUD/REGION or CLOUD/REGION/ZONE."""
    cloud, _, rest = tried.partition("/")
    if cloud != str(provider["name"]).lower():
        return False
    region, where = rest.partition("/")[0], _where(provider)
    return not region or where is None or where == region or where.startswith(f"{region}-")
