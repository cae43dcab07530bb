"""Whether an AWS account may rent a machine with these GPUs: asked with DryRun, so that none is made.

Neighbours: `launch doctor --ask` asks this once `orphaned_machines.py` has AWS's lists, which do not tell;
`provider_listings.py` has the question. Other clouds have no such question.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from launcher.backends.skypilot.cluster_request import ClusterRequest
from launcher.backends.skypilot.orphaned_machines import LABEL, LIST_SECONDS, home_label
from launcher.backends.skypilot.provider_listings import find_rent_refusal
from launcher.backends.skypilot.sky_process import SkyProcess

# A name as runs have it: a policy may ask for that.
_CLUSTER = "slip-00000000"
# In a search for one that does not refuse, from the cheapest on.
_MAX_REGIONS = 5


def refusals(sky: SkyProcess, gpus: str, places: Sequence[str], runs: Path) -> dict[str, str]:
    """AWS's error by region, if all regions that were asked refuse the machine; empty if that is not certain.

    `places`: as in `--infra`, AWS's alone. Raises LaunchError.
    """
    order = ClusterRequest(_CLUSTER, list(places), gpus, labels={LABEL: home_label(runs)})
    gpu, _, count = gpus.partition(":")
    offers = sky.call("offers", LIST_SECONDS, gpu=gpu, count=int(count or 1), infra=order.infra)["offers"]
    regions = list(dict.fromkeys(offer["infra"].split("/")[1] for offer in offers))
    found: dict[str, str] = {}
    for region in regions[:_MAX_REGIONS]:
        refusal = find_rent_refusal(sky, order, region)
        if refusal is None:
            return {}
        found[region] = refusal
    return found
