"""The machines of a cluster by its providers' own lists: finds where they may be, lists them, and ends them.

Neighbours: `sky_calls.py` answers with these in SkyPilot's process; `provider_listings.py` asks;
`sky_machines_by_name.py` has the machines of all clusters. Asks through SkyPilot's provisioners, never its
API server or its books.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from launcher.backends.skypilot import sky_aws_permissions, sky_identity
from launcher.backends.skypilot.sky_prices import machines_with, offers_at

Json = dict[str, Any]

# By the provisioners of SkyPilot 0.14: whose machines are listed and ended by the cluster's name alone, whose
# by name and region. GCP wants zone and project; the others more, which only a cluster's own books have.
LISTED_BY_NAME = ("cudo", "do", "fluidstack", "lambda", "paperspace", "runpod", "scp", "shadeform", "vast")
_LISTED_BY_REGION = ("aws", "nebius", "oci")
# Regions asked at the same time: an answer takes about half a second.
AT_ONCE = 8
# States in which a provider may go on listing a machine that is gone for good. Everything else on its list is
# a machine, in any state. SkyPilot itself takes unknown states for gone on GCP and Lambda, and raises on
# RunPod.
GONE = {
    "GCP": ("DEPROVISIONING",),
    "Lambda": ("terminating", "terminated"),
    "RunPod": ("TERMINATED",),
}
GOOGLE_ATTEMPTS = 3


def candidates(cluster: str, gpus: str, infra: list[str], accounts: Json | None = None) -> Json:
    """The places where machines named after this cluster may be, whatever the books have, each with the form
    of a request.

    Reads catalogs; asks AWS for the account's regions, if the account is the cluster's own by `accounts`.
    "unasked": the clouds that can only be asked with a cluster's entry in the books.
    """
    from sky.utils import common_utils, registry

    gpu, _, count = gpus.partition(":")
    found: Json = {"providers": [], "unasked": []}
    for place in infra:
        cloud = place.partition("/")[0]
        configs = _provider_configs(place, gpu, int(count or 1), accounts or {})
        if configs is None:
            found["unasked"] += [cloud] if cloud not in found["unasked"] else []
            continue
        kind: Any = registry.CLOUD_REGISTRY.from_str(cloud)
        name = common_utils.make_cluster_name_on_cloud(cluster, kind.max_cluster_name_length())
        provider = {"name": repr(kind), "cluster": cluster, "cluster_on_cloud": name}
        configured = [provider | {"config": config} for config in configs]
        # Two places of a cloud may share one list: its machines would be ended twice.
        found["providers"] += [one for one in configured if one not in found["providers"]]
    return found


def _provider_configs(place: str, gpu: str, count: int, accounts: Json) -> list[Json] | None:
    """The configuration by which SkyPilot's provisioner of a cloud lists and ends machines of a name."""
    cloud, _, rest = place.partition("/")
    region = rest.partition("/")[0]
    if cloud in LISTED_BY_NAME:
        return [{}]
    if cloud == "gcp":
        return _gcp_configs(region, gpu, accounts)
    if cloud not in _LISTED_BY_REGION:
        return None
    offers = [] if region else offers_at(cloud, gpu, count, {cloud: machines_with(cloud, gpu, count)})
    regions = {region} if region else {str(offer["infra"]).partition("/")[2] for offer in offers}
    if cloud == "aws":
        near = [region] if region else sorted(regions)
        had = (
            None if sky_identity.other_account(cloud, accounts) else sky_aws_permissions.account_regions(near)
        )
        regions = regions if had is None else regions & had
    return [{"region": one} for one in sorted(regions)]


def _gcp_configs(region: str, gpu: str, accounts: Json) -> list[Json]:
    from sky.catalog import common
    from sky.clouds import GCP

    rows: Any = common.read_catalog("gcp/vms.csv")
    zones = rows[rows["AcceleratorName"].str.lower() == gpu.lower()][["Region", "AvailabilityZone"]].dropna()
    here = sorted({str(zone) for one, zone in zones.values if region in ("", one)})
    project = accounts["gcp"]["id"] if "gcp" in accounts else GCP.get_project_id()
    return [{"project_id": project, "availability_zone": zone} for zone in here]


def instances(providers: list[Json], accounts: Json | None = None) -> Json:
    """Each provider's own list of the cluster's machines that are not gone, in the order they are given.

    "refused": the reason for each missing list, in the same order; a missing list is None, and proves
    nothing. "denied": whether a policy refused it, and not the network or a login. "others": the account that
    answered, if it is not the cluster's own by `accounts` (one cloud, one account).
    """
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(_answer, providers))
        # Where something is listed there is nothing to doubt.
        doubted = [denied or found == [] for found, _, denied in answers]
        clouds = [_cloud(one) if doubt else "" for one, doubt in zip(providers, doubted, strict=True)]
        names = sorted(set(clouds))
        answer = pool.map(lambda cloud: sky_identity.other_account(cloud, accounts or {}), names)
        answering = dict(zip(names, answer, strict=True))
    others = [answering[cloud] for cloud in clouds]
    lists, why, denied = ([one[part] for one in answers] for part in range(3))
    return {"instances": lists, "refused": why, "denied": denied, "others": others}


def _cloud(provider: Json) -> str:
    return str(provider["name"]).lower()


def _answer(provider: Json) -> tuple[list[str] | None, str | None, bool]:
    try:
        return _listed(provider), None, False
    except Exception as error:  # noqa: BLE001 - after any error there is no list of this one
        return None, f"{type(error).__name__}: {error}", sky_aws_permissions.is_denial(error)


def _listed(provider: Json) -> list[str]:
    from sky import provision

    name, cluster = provider["name"], provider["cluster_on_cloud"]
    if name in _STATES:
        states = _STATES[name](cluster, provider["config"])
        return sorted(machine for machine, state in states.items() if state not in GONE[name])
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
    request = machines.list(project=config["project_id"], zone=config["availability_zone"], filter=label)
    found: dict[str, str] = {}
    while request is not None:
        page = request.execute(num_retries=GOOGLE_ATTEMPTS)
        warning = page.get("warning", {}).get("code", "NO_RESULTS_ON_PAGE")
        if warning != "NO_RESULTS_ON_PAGE":
            raise RuntimeError(f"the list of {config['availability_zone']} is incomplete: {warning}")
        found |= {machine["name"]: machine["status"] for machine in page.get("items", [])}
        request = machines.list_next(request, page)
    return found


def lambda_instances() -> list[Json]:
    """Lambda's whole answer, because SkyPilot takes one without a list for an empty list. Raises KeyError
    then."""
    from sky.provision.lambda_cloud import lambda_utils

    headers = lambda_utils.LambdaCloudClient().headers
    answer: Any = lambda_utils._try_request_with_backoff(
        "get", f"{lambda_utils.API_ENDPOINT}/instances", headers=headers
    )
    return list(answer.json()["data"])


def runpod_pods() -> dict[str, Json]:
    """Each pod's "name" and "status", by its id."""
    from sky.provision.runpod import utils

    return utils.list_instances()


def _states_on_lambda(cluster: str, config: Json) -> dict[str, str]:
    found = lambda_instances()
    return {one["id"]: one["status"] for one in found if _is_of(cluster, one.get("name"))}


def _states_on_runpod(cluster: str, config: Json) -> dict[str, str]:
    pods = runpod_pods().items()
    return {pod: details["status"] for pod, details in pods if _is_of(cluster, details["name"])}


def _is_of(cluster: str, name: str | None) -> bool:
    """Whether a machine's name is SkyPilot's for one of the cluster; used where machines have no labels."""
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
