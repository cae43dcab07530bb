"""Machines with GPUs and their prices, from the catalogs at hand, as SkyPilot reads them.

Neighbours: `sky_calls.py` answers with these in SkyPilot's process, and uses the prices for a launch;
`sky_providers.py` uses the places; `prices.py` asks. Asks neither the API server nor a provider.
"""

from __future__ import annotations

import ast
import os
import re
from typing import Any

Json = dict[str, Any]

_ALL_TYPES = "common/accelerators.csv"
# The user's own clusters: no catalog, no price, and only the cluster knows its machines.
_SELF_HOSTED = ("kubernetes", "slurm", "ssh")


def offers(gpu: str, count: int, infra: list[str]) -> Json:
    """The machines with `count` GPUs of a type in the catalogs at hand, the cheapest first.

    Reads files: asks neither the API server nor a provider, and fetches nothing if `.meta` is not beside
    the catalogs. "types": every GPU type there and how many of it a machine has. "elsewhere": other
    clouds that have the type, by SkyPilot's own list. "without_prices": the clouds asked for
    that have no catalog here.
    """
    from sky.catalog import common

    clouds = list(dict.fromkeys(place.partition("/")[0] for place in infra))
    files = {
        cloud: common.get_catalog_path(f"{cloud}/vms.csv") for cloud in clouds if cloud not in _SELF_HOSTED
    }
    with_catalog = [cloud for cloud, file in files.items() if os.path.exists(file)]
    machines = {cloud: machines_with(cloud, gpu, count) for cloud in with_catalog}
    found = [offer for place in infra for offer in offers_at(place, gpu, count, machines)]
    first = {(offer["infra"], offer["instance_type"]): offer for offer in reversed(found)}
    return {
        "offers": sorted(first.values(), key=lambda offer: (offer["price_per_hour"], offer["infra"])),
        "types": _types(with_catalog),
        "elsewhere": [cloud for cloud in _clouds_with(gpu) if cloud not in clouds],
        "without_prices": [cloud for cloud in files if cloud not in with_catalog],
        "as_of": min((os.path.getmtime(files[cloud]) for cloud in with_catalog), default=None),
    }


def fetch(clouds: list[str]) -> Json:
    """Fetch the price catalogs of these clouds, and SkyPilot's list of all types, into a home without any.

    Raises the network's errors.
    """
    from sky.catalog import common

    names = [f"{cloud}/vms.csv" for cloud in clouds if cloud not in _SELF_HOSTED]
    for name in [*names, _ALL_TYPES]:
        rows: Any = common.read_catalog(name)
        _ = rows.columns  # read lazily, and fetched then
    return {"fetched": names}


def machines_with(cloud: str, gpu: str, count: int) -> list[Any]:
    """A cloud's machines with these GPUs, one for each region and type, as SkyPilot lists them."""
    from sky.catalog import common, gcp_catalog

    name = f"^{re.escape(gpu)}$"
    if cloud == "gcp":  # there GPUs and their host have prices of their own, which SkyPilot adds up
        found = gcp_catalog.list_accelerators(True, name, None, count, case_sensitive=False, all_regions=True)
    else:  # the clouds' own functions would first ask the provider what the account may use
        rows: Any = common.read_catalog(f"{cloud}/vms.csv")
        found = common.list_accelerators_impl(
            cloud, rows, True, name, None, count, case_sensitive=False, all_regions=True
        )
    return [machine for machines in found.values() for machine in machines]


def offers_at(place: str, gpu: str, count: int, machines: dict[str, list[Any]]) -> list[Json]:
    """The offers at one place asked for: CLOUD, CLOUD/REGION or CLOUD/REGION/ZONE."""
    cloud, _, rest = place.partition("/")
    if cloud in _SELF_HOSTED:
        offer = {"asked": place, "infra": place, "instance_type": None, "gpu": gpu, "count": count}
        return [offer | {"price_per_hour": 0.0}]
    region, _, zone = rest.partition("/")
    return [
        {
            "asked": place,
            # Within a region the price is the same.
            "infra": "/".join(part for part in (cloud, machine.region, zone) if part),
            "instance_type": machine.instance_type,
            "gpu": machine.accelerator_name,
            "count": count,
            "price_per_hour": float(machine.price),
        }
        for machine in machines.get(cloud, [])
        if machine.price == machine.price  # NaN: not to be had on demand
        and region.lower() in ("", str(machine.region).lower())
    ]


def _types(clouds: list[str]) -> dict[str, list[int]]:
    """Every GPU type in these catalogs, and how many of it one machine has."""
    from sky.catalog import common

    found: dict[str, set[int]] = {}
    for cloud in clouds:
        rows: Any = common.read_catalog(f"{cloud}/vms.csv")
        gpus = rows[rows["GpuInfo"].notna()][["AcceleratorName", "AcceleratorCount"]].dropna()
        for name, count in gpus.drop_duplicates().values:
            if float(count).is_integer():
                found.setdefault(str(name), set()).add(int(count))
    return {name: sorted(counts) for name, counts in sorted(found.items())}


def _clouds_with(gpu: str) -> list[str]:
    """The clouds that rent out a type, by SkyPilot's list of all types, if that is at hand."""
    from sky.catalog import common

    if not os.path.exists(common.get_catalog_path(_ALL_TYPES)):
        return []
    rows: Any = common.read_catalog(_ALL_TYPES)
    listed = rows[["AcceleratorName", "Clouds"]].values
    names = next((clouds for name, clouds in listed if name.lower() == gpu.lower()), "[]")
    return [name for cloud in ast.literal_eval(names) if (name := cloud.lower()) not in _SELF_HOSTED]
