"""What a run orders of SkyPilot: a cluster, its GPUs, and the places where it may be.

Neighbours: `cloud.py` makes it, `provision.py` carries it out, `verdicts.py` and `teardown.py` end what came
of it. Knows nothing of SkyPilot.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Order:
    """A cluster of this name with these GPUs, at the first place of `infra` that has them.

    `labels` are set when it is given."""

    cluster: str
    infra: list[str]
    gpus: str
    disk_gb: int | None = None
    idle_minutes: int = 10
    max_price_per_hour: float | None = None
    labels: dict[str, str] = field(default_factory=dict)
