"""The cluster that a run requests from SkyPilot: its GPUs, and the places where it may be.

Neighbours: `cloud_machine.py` makes it, `provision.py` carries it out, `provider_listings.py` and
`cluster_teardown.py` end its machines. Knows nothing of SkyPilot.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ClusterRequest:
    """A cluster of this name with these GPUs, at the first place of `infra` that has them.

    `labels` are set when the request is made. `unsure`: the places asked for it that did not refuse the
    request at that time. `accounts`: the account of the request, by cloud, as `sky_identity.account` returns
    it.
    """

    cluster: str
    infra: list[str]
    gpus: str
    disk_gb: int | None = None
    idle_minutes: int = 10
    max_price_per_hour: float | None = None
    labels: dict[str, str] = field(default_factory=dict)
    unsure: list[str] = field(default_factory=list)
    accounts: dict[str, dict[str, Any]] = field(default_factory=dict)

    def description(self) -> dict[str, Any]:
        """The fields that a machine's description keeps."""
        kept = ("infra", "gpus", "idle_minutes", "disk_gb", "labels", "unsure", "accounts")
        return {name: getattr(self, name) for name in kept}
