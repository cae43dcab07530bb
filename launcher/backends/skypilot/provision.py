"""The first launch of a run's cluster: empty, so that autodown is armed before anything else happens.

One cloud after the other, the cheapest first, each in a home without the other clouds' credentials, because
SkyPilot uploads the credentials it finds to the machine (G16). Neighbours: `cloud_machine.py` arms by this,
`sky_home.py` is the home, `cluster_teardown.py` ends its machines. Knows nothing of the machine's use.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from launcher.backends.skypilot import boot_timer
from launcher.backends.skypilot.cluster_request import ClusterRequest
from launcher.backends.skypilot.provider_listings import find_rent_refusal
from launcher.backends.skypilot.sky_home import SkyHome
from launcher.backends.skypilot.sky_process import NoAccessError, SkyCallError, SkyProcess
from launcher.backends.skypilot.task_file import task_file
from launcher.base.errors import CapacityError, LaunchError
from launcher.base.failpoints import failpoint
from launcher.types.clouds import clouds_of
from launcher.types.machine import Progress

IMPORT_SECONDS = 60.0
ARM_SECONDS = 1800.0
_ACCOUNT_SECONDS = 30.0


@dataclass(frozen=True)
class Provisioning:
    """One request in progress. `trying(places)` is called before a provider is asked for a machine, with all
    places asked so far; a place that refused the account is left out. `warn` gets messages for the user."""

    order: ClusterRequest
    home: SkyHome
    sky: SkyProcess
    trying: Callable[[list[str]], None]
    warn: Progress
    progress: Progress

    def run(self) -> dict[str, Any]:
        """The cluster, by SkyPilot's books: on the first cloud that has room and takes the credentials.

        Raises PreflightError, CapacityError: those of the last cloud.
        """
        clouds = clouds_of(self.order.infra)
        tried: list[str] = []
        try:
            for cloud, after in pairwise(clouds):
                try:
                    return self._on(cloud, tried)
                except (CapacityError, NoAccessError) as error:
                    self.warn(f"{cloud}: {error.message} ({error.why}); {after} is next")
                    self.sky.end()
            return self._on(clouds[-1], tried)
        finally:
            self.home.make()  # from here on the others are only asked, where they were tried

    def _on(self, cloud: str, tried: list[str]) -> dict[str, Any]:
        for line in self._begin(cloud):
            self.warn(line)
        # then the account is unknown, and the teardown goes without it
        with contextlib.suppress(LaunchError):
            if (found := self.sky.call("account", _ACCOUNT_SECONDS, cloud=cloud)) is not None:
                self.order.accounts[cloud] = found
        steps = self._steps(cloud)
        for step, after in pairwise(steps):
            try:
                return self._launch(step, tried)
            except CapacityError as error:
                message = f"{step.name}: {error.message} ({error.why}); {after.name} is next"
                if isinstance(error, _DeniedError):
                    self.warn(message)
                    self.sky.end()
                    self._begin(cloud)  # its books have half a cluster there
                else:
                    self.progress(message)
        return self._launch(steps[-1], tried)

    def _begin(self, cloud: str) -> list[str]:
        """Make a new home without any state. Returns the settings of the user's configuration that were
        left out, one a line."""
        self.home.remove()
        at_boot = boot_timer.boot_commands(cloud, self.order.idle_minutes)
        left_out = self.home.make(only=cloud, boot_commands=at_boot)
        self.home.serve()
        self.sky.call("version", IMPORT_SECONDS)
        return left_out

    def _steps(self, cloud: str) -> list[_Step]:
        """The requests in order. On AWS one region each, so that the record names those that were asked;
        elsewhere all of the cloud at once."""
        places = [place for place in self.order.infra if clouds_of([place]) == [cloud]]
        whole = [_Step(places, None)]
        if cloud != "aws":
            return whole
        gpu, _, count = self.order.gpus.partition(":")
        found = self.sky.call("offers", IMPORT_SECONDS, gpu=gpu, count=int(count or 1), infra=places)
        most = self.order.max_price_per_hour
        return [
            _Step([offer["infra"]], offer["instance_type"])
            for offer in found["offers"]
            if most is None or offer["price_per_hour"] <= most
        ] or whole

    def _launch(self, step: _Step, tried: list[str]) -> dict[str, Any]:
        before, unsure = list(tried), self.order.unsure
        sure = list(unsure)
        tried += [place for place in step.places if place not in tried]
        unsure += [place for place in step.places if place not in unsure]
        self.trying(tried)
        failpoint("cloud.launching")
        order = self.order
        try:
            return self.sky.call(
                "launch",
                ARM_SECONDS,
                self.progress,
                task_file=str(task_file("arm.yaml")),
                cluster=order.cluster,
                infra=step.places,
                gpus=order.gpus,
                disk_gb=order.disk_gb,
                idle_minutes=order.idle_minutes,
                max_price_per_hour=order.max_price_per_hour,
                labels=order.labels,
                instance_type=step.instance_type,
            )
        except NoAccessError:
            tried[:], unsure[:] = before, sure
            self.trying(tried)
            raise
        except SkyCallError as error:
            try:
                self._refuse_denied(step)
            except _DeniedError:
                unsure[:] = sure
                self.trying(tried)
                raise
            raise error

    def _refuse_denied(self, step: _Step) -> None:
        """Raises _DeniedError if the account may not have it there: SkyPilot trips over that, and the next
        place may do."""
        word = None
        if step.instance_type is not None:
            with contextlib.suppress(LaunchError):  # then it is SkyPilot's own trouble that counts
                word = find_rent_refusal(self.sky, self.order, step.places[0].split("/")[1])
        if word is not None:
            hint = "ask who manages the account, or name other places in --infra"
            raise _DeniedError("the account may not have this machine there", word, hint)


class _DeniedError(CapacityError):
    """A policy of the account refuses this machine at this place."""


@dataclass(frozen=True)
class _Step:
    """Places that SkyPilot is asked for at once, and one type of machine or any."""

    places: list[str]
    instance_type: str | None

    @property
    def name(self) -> str:
        return " ".join([*self.places, *([self.instance_type] if self.instance_type else [])])
