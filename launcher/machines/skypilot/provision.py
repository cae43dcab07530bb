"""The first launch of a run's cluster: empty, so that autodown is armed before anything else happens.

One cloud after the other, the cheapest first, each in a home that shows SkyPilot no other's credentials: what
it sees while it launches, it uploads to the machine (G16). Neighbours: `cloud.py` arms by this, `sky_home.py`
is the home, `teardown.py` ends what it began. Knows nothing of what the machine is for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from launcher.base.errors import CapacityError
from launcher.base.failpoints import passing
from launcher.machines.skypilot.sky_home import SkyHome
from launcher.machines.skypilot.sky_process import NoAccessError, SkyProcess
from launcher.machines.skypilot.task_file import task_file
from launcher.values.clouds import clouds_of
from launcher.values.machine import Progress

IMPORT_SECONDS = 60.0
ARM_SECONDS = 1800.0


@dataclass(frozen=True)
class Order:
    """A cluster of this name with these GPUs, at the first place of `infra` that has them."""

    cluster: str
    infra: list[str]
    gpus: str
    disk_gb: int | None
    idle_minutes: int
    max_price_per_hour: float | None
    labels: dict[str, str]


@dataclass(frozen=True)
class Provisioning:
    """One order at work. `asking(True)` is called before a provider is asked for a machine, `asking(False)`
    when none was; `warn` is told of what the user should know."""

    order: Order
    home: SkyHome
    sky: SkyProcess
    asking: Callable[[bool], None]
    warn: Progress
    progress: Progress

    def run(self) -> dict[str, Any]:
        """The cluster, as SkyPilot's books have it. Raises PreflightError, CapacityError."""
        clouds = clouds_of(self.order.infra)
        try:
            for cloud, after in pairwise(clouds):
                try:
                    return self._on(cloud, first=cloud == clouds[0])
                except CapacityError as error:
                    self.warn(f"{cloud}: {error.message} ({error.why}); {after} is next")
                    self.sky.end()
            return self._on(clouds[-1], first=len(clouds) == 1)
        finally:
            self.home.make()  # from here on the others are only asked, where they were tried

    def _on(self, cloud: str, first: bool) -> dict[str, Any]:
        self.home.remove()
        for line in self.home.make(only=cloud):
            self.warn(line)
        self.home.serve()
        self.sky.call("version", IMPORT_SECONDS)
        self.asking(True)
        passing("cloud.launching")
        order = self.order
        try:
            return self.sky.call(
                "launch",
                ARM_SECONDS,
                self.progress,
                task_file=str(task_file("arm.yaml")),
                cluster=order.cluster,
                infra=[place for place in order.infra if clouds_of([place]) == [cloud]],
                gpus=order.gpus,
                disk_gb=order.disk_gb,
                idle_minutes=order.idle_minutes,
                max_price_per_hour=order.max_price_per_hour,
                labels=order.labels,
            )
        except NoAccessError:
            self.asking(not first)
            raise
