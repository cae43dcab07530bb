"""The first launch of a run's cluster: empty, so that autodown is armed before anything else happens.

One cloud after the other, the cheapest first, each in a home that shows SkyPilot no other's credentials: what
it sees while it launches, it uploads to the machine (G16). Neighbours: `cloud.py` arms by this, `sky_home.py`
is the home, `teardown.py` ends what it began. Knows nothing of what the machine is for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from launcher.errors import CapacityError
from launcher.failpoints import passing
from launcher.machines import scripts
from launcher.machines.accounts import clouds_of
from launcher.machines.base import Progress
from launcher.machines.sky_home import SkyHome
from launcher.machines.sky_process import NoAccessError, SkyProcess

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


def provision(
    order: Order,
    home: SkyHome,
    sky: SkyProcess,
    asking: Callable[[bool], None],
    warn: Progress,
    progress: Progress,
) -> dict[str, Any]:
    """The cluster, as SkyPilot's books have it. Raises PreflightError, CapacityError.

    `asking(True)` is called before a provider is asked for a machine, `asking(False)` when none was.
    """
    clouds = clouds_of(order.infra)
    for number, cloud in enumerate(clouds):
        try:
            return _on(cloud, order, home, sky, asking, warn, progress)
        except CapacityError as error:
            if number + 1 == len(clouds):
                raise
            warn(f"{cloud}: {error.message} ({error.why}); {clouds[number + 1]} is next")
            sky.end()
            home.remove()
        except NoAccessError:
            asking(number > 0)
            raise
        finally:
            home.make()  # from here on the others are only asked, where they were tried
    raise AssertionError("a run is somewhere")  # `clouds_of` is never empty


def _on(
    cloud: str,
    order: Order,
    home: SkyHome,
    sky: SkyProcess,
    asking: Callable[[bool], None],
    warn: Progress,
    progress: Progress,
) -> dict[str, Any]:
    home.remove()
    for line in home.make(only=cloud):
        warn(line)
    home.serve()
    sky.call("version", IMPORT_SECONDS)
    asking(True)
    passing("cloud.launching")
    return sky.call(
        "launch",
        ARM_SECONDS,
        progress,
        task_file=str(scripts.task_file("arm.yaml")),
        cluster=order.cluster,
        infra=[place for place in order.infra if clouds_of([place]) == [cloud]],
        gpus=order.gpus,
        disk_gb=order.disk_gb,
        idle_minutes=order.idle_minutes,
        max_price_per_hour=order.max_price_per_hour,
        labels=order.labels,
    )
