"""SkyPilot's calls, in a process of their own: with sky_server.py the only importer of `sky`.

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
from concurrent.futures import ThreadPoolExecutor
from typing import Any

Json = dict[str, Any]

_ALL_TYPES = "common/accelerators.csv"
# Clusters of one's own: no catalog, no price, and only they know what they have.
_OWN = ("kubernetes", "slurm", "ssh")
# By the provisioners of SkyPilot 0.14: whose machines are listed and ended by the cluster's name alone, whose
# by name and region. GCP wants zone and project; the others more, which only a cluster's own books have.
_LISTED_BY_NAME = ("cudo", "do", "fluidstack", "lambda", "paperspace", "runpod", "scp", "shadeform", "vast")
_LISTED_BY_REGION = ("aws", "nebius", "oci")
_AWS_FIRST = "us-east-1"
# Regions asked at the same time: an answer takes about half a second.
_AT_ONCE = 8
# What a provider may go on listing although it is gone for good. Everything else it lists is a machine, in
# whatever state: SkyPilot takes states it does not know for gone on GCP and Lambda, and raises on RunPod.
_GONE = {
    "GCP": ("DEPROVISIONING",),
    "Lambda": ("terminating", "terminated"),
    "RunPod": ("TERMINATED",),
}
_GOOGLE_ATTEMPTS = 3


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


def fetch(clouds: list[str]) -> Json:
    """Fetch the price catalogs of these clouds, and SkyPilot's list of all types, into a home without any.

    Raises what the network says.
    """
    version()
    from sky.catalog import common

    names = [f"{cloud}/vms.csv" for cloud in clouds if cloud not in _OWN]
    for name in [*names, _ALL_TYPES]:
        rows: Any = common.read_catalog(name)
        _ = rows.columns  # read lazily, and fetched then
    return {"fetched": names}


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
    labels: dict[str, str],
    max_price_per_hour: float | None = None,
) -> Json:
    """The first launch of a cluster: an empty task, so that autodown is armed as soon as it is up."""
    from sky.skylet.autostop_lib import AutostopWaitFor

    import sky

    import_what_ends()
    if max_price_per_hour is not None:
        infra = _within(max_price_per_hour, infra, gpus)
    task = sky.Task.from_yaml(task_file)
    wanted: Json = {"accelerators": gpus, "disk_size": disk_gb, "max_hourly_cost": max_price_per_hour}
    wanted["labels"] = labels  # where a provider has none, they are left out
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


def _within(max_price_per_hour: float, infra: list[str], gpus: str) -> list[str]:
    """Where it may be at this price. Of Google's machines, whose hosts have prices of their own, SkyPilot
    compares none with it. Raises ResourcesUnavailableError for nowhere."""
    from sky import exceptions

    gpu, _, count = gpus.partition(":")
    places: list[str] = []
    for place in infra:
        if place.partition("/")[0] != "gcp":
            places.append(place)
            continue
        number = int(count or 1)
        found = _offers_at(place, gpu, number, {"gcp": _machines("gcp", gpu, number)})
        places += [offer["infra"] for offer in found if offer["price_per_hour"] <= max_price_per_hour]
    if not places:
        where = ", ".join(infra)
        raise exceptions.ResourcesUnavailableError(f"{gpus} cost more than {max_price_per_hour}/h on {where}")
    return list(dict.fromkeys(places))


def import_what_ends() -> None:
    """What the end of a cluster takes, imported before there is one: an upgrade of SkyPilot in mid-run must
    not meet an old half of it in this process."""
    from sky.adaptors import aws
    from sky.backends import backend_utils
    from sky.catalog import common
    from sky.provision.constants import TAG_RAY_CLUSTER_NAME
    from sky.provision.gcp import instance_utils
    from sky.provision.lambda_cloud import lambda_utils
    from sky.provision.runpod import utils
    from sky.utils import common_utils, registry

    from sky import exceptions, global_user_state, provision

    _ = (aws, backend_utils, common, TAG_RAY_CLUSTER_NAME, common_utils, registry)
    _ = (instance_utils, lambda_utils, utils)
    _ = (exceptions, global_user_state, provision)


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
    config = global_user_state.get_cluster_yaml_dict(handle.cluster_yaml)["provider"]
    found: Json = {
        "provider": {
            "name": repr(resources.cloud),
            "cluster": cluster,
            "cluster_on_cloud": handle.cluster_name_on_cloud,
            # As in `candidates`: who is asked without a region is one provider, wherever the machine is.
            "config": {} if repr(resources.cloud).lower() in _LISTED_BY_NAME else config,
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
            "key": os.path.realpath(os.path.expanduser(login["ssh_private_key"])),
            "port": handle.head_ssh_port or 22,
            "proxy_command": login.get("ssh_proxy_command"),
        }
    return found


def candidates(cluster: str, gpus: str, infra: list[str]) -> Json:
    """Where machines named after this cluster may be, whatever the books say: how each provider is asked.

    Reads catalogs; of AWS it asks which regions the account has. "unasked": the clouds of which only a
    cluster's entry in the books says how they are asked.
    """
    from sky.utils import common_utils, registry

    gpu, _, count = gpus.partition(":")
    found: Json = {"providers": [], "unasked": []}
    for place in infra:
        cloud = place.partition("/")[0]
        configs = _provider_configs(place, gpu, int(count or 1))
        if configs is None:
            found["unasked"] += [cloud] if cloud not in found["unasked"] else []
            continue
        kind: Any = registry.CLOUD_REGISTRY.from_str(cloud)
        name = common_utils.make_cluster_name_on_cloud(cluster, kind.max_cluster_name_length())
        provider = {"name": repr(kind), "cluster": cluster, "cluster_on_cloud": name}
        asked = [provider | {"config": config} for config in configs]
        # Two places of a cloud may be one list: what is on it would be ended twice.
        found["providers"] += [one for one in asked if one not in found["providers"]]
    return found


def _provider_configs(place: str, gpu: str, count: int) -> list[Json] | None:
    """What SkyPilot's provisioner of a cloud wants to know to list and end machines of a name."""
    cloud, _, rest = place.partition("/")
    region = rest.partition("/")[0]
    if cloud in _LISTED_BY_NAME:
        return [{}]
    if cloud == "gcp":
        return _gcp_configs(region, gpu)
    if cloud not in _LISTED_BY_REGION:
        return None
    offers = [] if region else _offers_at(cloud, gpu, count, {cloud: _machines(cloud, gpu, count)})
    regions = {region} if region else {str(offer["infra"]).partition("/")[2] for offer in offers}
    if cloud == "aws":
        regions &= _aws_regions(region)
    return [{"region": one} for one in sorted(regions)]


def _gcp_configs(region: str, gpu: str) -> list[Json]:
    from sky.catalog import common
    from sky.clouds import GCP

    rows: Any = common.read_catalog("gcp/vms.csv")
    zones = rows[rows["AcceleratorName"].str.lower() == gpu.lower()][["Region", "AvailabilityZone"]].dropna()
    here = sorted({str(zone) for one, zone in zones.values if region in ("", one)})
    return [{"project_id": GCP.get_project_id(), "availability_zone": zone} for zone in here]


def _aws_regions(ask: str) -> set[str]:
    """The regions this account has: in another one neither it nor its list answers."""
    from sky.adaptors import aws

    client: Any = aws.client("ec2", region_name=ask or _AWS_FIRST)
    return {region["RegionName"] for region in client.describe_regions()["Regions"]}


def instances(providers: list[Json]) -> Json:
    """Each provider's own list of the cluster's machines that are not gone, in the order they are given.

    Raises what a provider says: without one of the lists nothing is proven.
    """
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return {"instances": list(pool.map(_listed, providers))}


def _listed(provider: Json) -> list[str]:
    from sky import provision

    name, cluster = provider["name"], provider["cluster_on_cloud"]
    if name in _STATES:
        states = _STATES[name](cluster, provider["config"])
        return sorted(machine for machine, state in states.items() if state not in _GONE[name])
    return sorted(
        provision.query_instances(
            name, provider["cluster"], cluster, provider["config"], non_terminated_only=True
        )
    )


def _states_on_gcp(cluster: str, config: Json) -> dict[str, str]:
    """Page by page: SkyPilot reads the first, which may be an empty one. Raises RuntimeError for a list that
    Google itself calls incomplete."""
    from sky.provision.constants import TAG_RAY_CLUSTER_NAME
    from sky.provision.gcp.instance_utils import GCPComputeInstance

    machines: Any = GCPComputeInstance.load_resource().instances()
    label = f"labels.{TAG_RAY_CLUSTER_NAME} = {cluster}"
    asked = machines.list(project=config["project_id"], zone=config["availability_zone"], filter=label)
    found: dict[str, str] = {}
    while asked is not None:
        page = asked.execute(num_retries=_GOOGLE_ATTEMPTS)
        warning = page.get("warning", {}).get("code", "NO_RESULTS_ON_PAGE")
        if warning != "NO_RESULTS_ON_PAGE":
            raise RuntimeError(f"the list of {config['availability_zone']} is incomplete: {warning}")
        found |= {machine["name"]: machine["status"] for machine in page.get("items", [])}
        asked = machines.list_next(asked, page)
    return found


def _states_on_lambda(cluster: str, config: Json) -> dict[str, str]:
    """By the whole answer: SkyPilot takes one without a list for an empty list. Raises KeyError then."""
    from sky.provision.lambda_cloud import lambda_utils

    headers = lambda_utils.LambdaCloudClient().headers
    answer: Any = lambda_utils._try_request_with_backoff(
        "get", f"{lambda_utils.API_ENDPOINT}/instances", headers=headers
    )
    return {one["id"]: one["status"] for one in answer.json()["data"] if _is_of(cluster, one.get("name"))}


def _states_on_runpod(cluster: str, config: Json) -> dict[str, str]:
    from sky.provision.runpod import utils

    pods = utils.list_instances().items()
    return {pod: said["status"] for pod, said in pods if _is_of(cluster, said["name"])}


def _is_of(cluster: str, name: str | None) -> bool:
    """Whether a machine's name is SkyPilot's for one of the cluster, where there are no labels."""
    return name in (f"{cluster}-head", f"{cluster}-worker")


_STATES = {"GCP": _states_on_gcp, "Lambda": _states_on_lambda, "RunPod": _states_on_runpod}


def terminate(provider: Json) -> Json:
    """End the cluster's machines at the provider itself: for those SkyPilot has forgotten."""
    from sky import provision

    if provider["name"] == "AWS":  # SkyPilot's own asks for the network of the launch before
        from sky.adaptors import aws
        from sky.provision.constants import TAG_RAY_CLUSTER_NAME

        named = {"Name": f"tag:{TAG_RAY_CLUSTER_NAME}", "Values": [provider["cluster_on_cloud"]]}
        ec2: Any = aws.resource("ec2", region_name=provider["config"]["region"])
        ec2.instances.filter(Filters=[named]).terminate()
        return {}
    provision.terminate_instances(provider["name"], provider["cluster_on_cloud"], provider["config"])
    return {}


def strays(cloud: str, name: str, label: str) -> Json | None:
    """All of an account's machines whose cluster's name fits `name` (a shell's pattern), whoever began them:
    what the cluster is called there, what `label` says, and how the provider is asked for it.

    None for a provider whose list SkyPilot gives for one cluster only.
    """
    if cloud != "aws":
        return None
    from sky.adaptors import aws
    from sky.provision.constants import TAG_RAY_CLUSTER_NAME

    lives = {"Name": "instance-state-name", "Values": ["pending", "running", "stopping", "stopped"]}
    named = {"Name": f"tag:{TAG_RAY_CLUSTER_NAME}", "Values": [name]}

    def listed(region: str, client: Any) -> list[Json]:
        config = {"region": region}
        found: list[Json] = []
        for page in client.get_paginator("describe_instances").paginate(Filters=[lives, named]):
            for machine in (one for made in page["Reservations"] for one in made["Instances"]):
                tags = {tag["Key"]: tag["Value"] for tag in machine["Tags"]}
                cluster = tags[TAG_RAY_CLUSTER_NAME]
                provider = {"name": "AWS", "cluster": cluster, "cluster_on_cloud": cluster, "config": config}
                found.append(
                    {
                        "id": machine["InstanceId"],
                        "instance_type": machine["InstanceType"],
                        "began": machine["LaunchTime"].timestamp(),
                        "label": tags.get(label),
                        "provider": provider,
                    }
                )
        return found

    # Of one session, which reads what boto3 knows of EC2 once; it is not made for threads.
    session: Any = aws.session()
    regions = sorted(_aws_regions(""))
    clients = [session.client("ec2", region_name=region) for region in regions]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return {"machines": [one for some in pool.map(listed, regions, clients) for one in some]}


_OFFERED = (version, offers, fetch, launch, down, standing, candidates, instances, terminate, strays)
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
