"""SkyPilot's calls, in a process of their own: the only importer of `sky`.

    python -m launcher.machines.sky_calls      a JSON request a line on stdin, a JSON answer a line on stdout

A process of its own, because SkyPilot reads HOME and its variables when it is imported, and its home is not
ours; because importing it takes 2 to 4 s; and because a call of it that hangs can then be left behind.
What SkyPilot prints goes to stderr. Neighbours: `sky_process.py` is the other end, `cloud.py` uses that.
"""

from __future__ import annotations

import ast
import json
import os
import re
import sys
import traceback
from collections.abc import Callable
from typing import Any

Json = dict[str, Any]

_ALL_TYPES = "common/accelerators.csv"
# Clusters of one's own: no catalog, no price, and only they know what they have.
_OWN = ("kubernetes", "slurm", "ssh")


def version() -> Json:
    """SkyPilot's version. Also what costs the import: asked early, it is over when it matters."""
    import sky

    # Where SkyPilot is not installed, a folder named `sky` imports as an empty package.
    if not hasattr(sky, "launch"):
        raise ModuleNotFoundError("No module named 'sky'")
    return {"version": sky.__version__}


def offers(gpu: str, count: int, infra: list[str]) -> Json:
    """What the price catalogs at hand have of machines with `count` GPUs of a type, the cheapest first.

    Reads files: asks neither the API server nor a provider, and fetches nothing where `.meta` is not beside
    the catalogs. "types": every GPU type there and how many of it a machine has. "elsewhere": other
    clouds that have the type, by SkyPilot's own list. "without_prices": the clouds asked for
    that have no catalog here.
    """
    version()
    from sky.catalog import common

    clouds = list(dict.fromkeys(place.partition("/")[0] for place in infra))
    files = {cloud: common.get_catalog_path(f"{cloud}/vms.csv") for cloud in clouds if cloud not in _OWN}
    at_hand = [cloud for cloud, file in files.items() if os.path.exists(file)]
    machines = {cloud: _machines(cloud, gpu, count) for cloud in at_hand}
    found = [offer for place in infra for offer in _offers_at(place, gpu, count, machines)]
    first = {(offer["infra"], offer["instance_type"]): offer for offer in reversed(found)}
    return {
        "offers": sorted(first.values(), key=lambda offer: (offer["price_per_hour"], offer["infra"])),
        "types": _types(at_hand),
        "elsewhere": [cloud for cloud in _clouds_with(gpu) if cloud not in clouds],
        "without_prices": [cloud for cloud in files if cloud not in at_hand],
        "as_of": min((os.path.getmtime(files[cloud]) for cloud in at_hand), default=None),
    }


def _machines(cloud: str, gpu: str, count: int) -> list[Any]:
    """A cloud's machines with these GPUs, one for each region and type, as SkyPilot lists them."""
    from sky.catalog import common, gcp_catalog

    name = f"^{re.escape(gpu)}$"
    if cloud == "gcp":  # there GPUs and their host have prices of their own, which SkyPilot adds up
        found = gcp_catalog.list_accelerators(True, name, None, count, case_sensitive=False, all_regions=True)
    else:  # the clouds' own functions would first ask the provider what this account sees
        rows: Any = common.read_catalog(f"{cloud}/vms.csv")
        found = common.list_accelerators_impl(
            cloud, rows, True, name, None, count, case_sensitive=False, all_regions=True
        )
    return [machine for machines in found.values() for machine in machines]


def _offers_at(place: str, gpu: str, count: int, machines: dict[str, list[Any]]) -> list[Json]:
    """The offers at one place asked for: CLOUD, CLOUD/REGION or CLOUD/REGION/ZONE."""
    cloud, _, rest = place.partition("/")
    if cloud in _OWN:
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
    """The clouds that rent out a type, by SkyPilot's list of all types, where that is at hand."""
    from sky.catalog import common

    if not os.path.exists(common.get_catalog_path(_ALL_TYPES)):
        return []
    rows: Any = common.read_catalog(_ALL_TYPES)
    listed = rows[["AcceleratorName", "Clouds"]].values
    names = next((clouds for name, clouds in listed if name.lower() == gpu.lower()), "[]")
    return [name for cloud in ast.literal_eval(names) if (name := cloud.lower()) not in _OWN]


def launch(
    task_file: str,
    cluster: str,
    infra: list[str],
    gpus: str,
    disk_gb: int | None,
    idle_minutes: int,
    max_price_per_hour: float | None = None,
) -> Json:
    """The first launch of a cluster: an empty task, so that autodown is armed as soon as it is up."""
    from sky.skylet.autostop_lib import AutostopWaitFor

    import sky

    task = sky.Task.from_yaml(task_file)
    wanted: Json = {"accelerators": gpus, "disk_size": disk_gb, "max_hourly_cost": max_price_per_hour}
    choices = [sky.Resources(infra=one, **wanted) for one in infra]
    task.set_resources(set(choices))
    request = sky.launch(
        task,
        cluster_name=cluster,
        idle_minutes_to_autostop=idle_minutes,
        wait_for=AutostopWaitFor.NONE,  # a running job must not keep the machine alive: the runtime is one
        down=True,
    )
    sky.stream_and_get(request)
    found = standing(cluster)
    if found is None:
        raise RuntimeError(f"SkyPilot launched {cluster} and knows nothing of it")
    return found


def down(cluster: str) -> Json:
    """End the cluster, also in the middle of its launch; nothing happens when SkyPilot knows of none."""
    import sky
    from sky import exceptions

    try:
        sky.stream_and_get(sky.down(cluster))
    except exceptions.ClusterDoesNotExist:
        return {"known": False}
    return {"known": True}


def standing(cluster: str) -> Json | None:
    """What SkyPilot's own books say of a cluster: how it is reached, where it is, how its provider is asked.

    None when there is no such cluster. Asks neither the API server nor the provider.
    """
    from sky.backends import backend_utils

    from sky import global_user_state

    # Any: the handles of SkyPilot's clouds share these attributes, their base class does not name them.
    handle: Any = global_user_state.get_handle_from_cluster_name(cluster)
    if handle is None:
        return None
    resources = handle.launched_resources
    found: Json = {
        "provider": {
            "name": repr(resources.cloud),
            "cluster": cluster,
            "cluster_on_cloud": handle.cluster_name_on_cloud,
            "config": global_user_state.get_cluster_yaml_dict(handle.cluster_yaml)["provider"],
        },
        "where": "/".join(part for part in (str(resources.cloud), resources.region, resources.zone) if part),
        "instance_type": resources.instance_type,
        "price_per_hour": resources.get_cost(3600) * handle.launched_nodes,
        "address": handle.head_ip,
        "ssh": None,
    }
    if handle.head_ip is not None:
        login = backend_utils.ssh_credential_from_yaml(handle.cluster_yaml, ssh_user=handle.ssh_user)
        found["ssh"] = {
            "user": login["ssh_user"],
            "key": os.path.expanduser(login["ssh_private_key"]),
            "port": handle.head_ssh_port or 22,
            "proxy_command": login.get("ssh_proxy_command"),
        }
    return found


def instances(provider: Json) -> Json:
    """The provider's own list of the cluster's machines that are not gone. Raises what the provider says."""
    from sky import provision

    found = provision.query_instances(
        provider["name"],
        provider["cluster"],
        provider["cluster_on_cloud"],
        provider["config"],
        non_terminated_only=True,
    )
    return {"instances": sorted(found)}


def terminate(provider: Json) -> Json:
    """End the cluster's machines at the provider itself: for those SkyPilot has forgotten."""
    from sky import provision

    provision.terminate_instances(provider["name"], provider["cluster_on_cloud"], provider["config"])
    return {}


_OFFERED = (version, offers, launch, down, standing, instances, terminate)
_CALLS: dict[str, Callable[..., Json | None]] = {call.__name__: call for call in _OFFERED}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer: Json = {"answer": _CALLS[request["call"]](**request["arguments"])}
        except BaseException as error:  # noqa: BLE001 - whatever SkyPilot raises is the other end's to judge
            traceback.print_exc()
            kinds = [kind.__name__ for kind in type(error).__mro__[:-2]]
            answer = {"error": {"kinds": kinds, "text": str(error)}}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
