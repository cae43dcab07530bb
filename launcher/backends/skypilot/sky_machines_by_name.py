"""Lists all of an account's machines that have a run's name, also those without a record.

Neighbours: `sky_providers.py` lists the machines of one cluster; `sky_calls.py` answers with these in
SkyPilot's process, and `orphaned_machines.py` asks. Asks the providers' own lists, never SkyPilot's API
server or its books.
"""

from __future__ import annotations

import datetime
import fnmatch
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from launcher.backends.skypilot import sky_aws_permissions
from launcher.backends.skypilot.sky_providers import (
    AT_ONCE,
    GONE,
    GOOGLE_ATTEMPTS,
    lambda_instances,
    runpod_pods,
)

Json = dict[str, Any]


def machines_named(cloud: str, name: str, label: str) -> Json | None:
    """The machines whose cluster's name fits `name` (a shell's pattern): the cluster's name there, the value
    of `label`, and the form of a request for it. "labels": whether the provider has labels.

    "answered": the places that gave their lists; "denied": those whose lists the account may not see;
    "silent": those that could not be asked; the last two with reasons. None for a provider whose list
    SkyPilot gives for one cluster only.
    """
    listing = _LISTINGS.get(cloud)
    return None if listing is None else listing(name, label)


def _on_aws(name: str, label: str) -> Json:
    from sky.adaptors import aws

    # All threads share one session, whose data about EC2 is read once; making a session is not safe in
    # threads.
    session: Any = aws.session(profile=aws.get_workspace_profile())
    regions = sorted(sky_aws_permissions.account_regions() or session.get_available_regions("ec2"))
    clients = [session.client("ec2", region_name=region) for region in regions]
    found: Json = {"machines": [], "answered": [], "denied": {}, "silent": {}, "labels": True}

    def listed(region: str, client: Any) -> list[Json] | Exception:
        try:
            return _in_region(client, region, name, label)
        except Exception as error:  # noqa: BLE001 - one that does not answer hides no other
            return error

    with ThreadPoolExecutor(AT_ONCE) as pool:
        for region, outcome in zip(regions, pool.map(listed, regions, clients), strict=True):
            where = f"AWS {region}"
            if isinstance(outcome, Exception):
                kind = "denied" if sky_aws_permissions.is_denial(outcome) else "silent"
                found[kind][where] = f"{type(outcome).__name__}: {outcome}"
            else:
                found["answered"].append(where)
                found["machines"] += outcome
    return found


def _in_region(client: Any, region: str, name: str, label: str) -> list[Json]:
    from sky.provision.constants import TAG_RAY_CLUSTER_NAME

    lives = {"Name": "instance-state-name", "Values": ["pending", "running", "stopping", "stopped"]}
    named = {"Name": f"tag:{TAG_RAY_CLUSTER_NAME}", "Values": [name]}
    found: list[Json] = []
    for page in client.get_paginator("describe_instances").paginate(Filters=[lives, named]):
        for machine in (one for made in page["Reservations"] for one in made["Instances"]):
            tags = {tag["Key"]: tag["Value"] for tag in machine["Tags"]}
            provider = _provider("AWS", tags[TAG_RAY_CLUSTER_NAME], {"region": region})
            began = machine["LaunchTime"].timestamp()
            found.append(
                _machine(machine["InstanceId"], provider, machine["InstanceType"], began, tags.get(label))
            )
    return found


def _on_gcp(name: str, label: str) -> Json:
    """The machines of all zones at once. Raises RuntimeError for a list that Google calls incomplete."""
    from sky.clouds import GCP
    from sky.provision.constants import TAG_RAY_CLUSTER_NAME
    from sky.provision.gcp.instance_utils import GCPComputeInstance

    project = GCP.get_project_id()
    machines: Any = GCPComputeInstance.load_resource().instances()
    request = machines.aggregatedList(project=project, filter=f"labels.{TAG_RAY_CLUSTER_NAME}:*")
    found: list[Json] = []
    while request is not None:
        page = request.execute(num_retries=GOOGLE_ATTEMPTS)
        for scope, scoped_list in page.get("items", {}).items():
            warning = scoped_list.get("warning", {}).get("code", "NO_RESULTS_ON_PAGE")
            if warning != "NO_RESULTS_ON_PAGE":
                raise RuntimeError(f"the list of {scope} is incomplete: {warning}")
            zone = scope.removeprefix("zones/")
            for one in scoped_list.get("instances", []):
                labels = one.get("labels", {})
                cluster = labels.get(TAG_RAY_CLUSTER_NAME, "")
                if one["status"] in GONE["GCP"] or not fnmatch.fnmatchcase(cluster, name):
                    continue
                provider = _provider("GCP", cluster, {"project_id": project, "availability_zone": zone})
                began = datetime.datetime.fromisoformat(one["creationTimestamp"]).timestamp()
                kind = one["machineType"].rpartition("/")[2]
                found.append(_machine(one["name"], provider, kind, began, labels.get(label)))
        request = machines.aggregatedList_next(request, page)
    return {"machines": found, "answered": ["GCP"], "denied": {}, "silent": {}, "labels": True}


def _on_lambda(name: str, label: str) -> Json:
    rows = [
        (one["id"], one.get("name"), one["status"], one["instance_type"]["name"])
        for one in lambda_instances()
    ]
    return _without_labels("Lambda", name, rows)


def _on_runpod(name: str, label: str) -> Json:
    rows = [(pod, details["name"], details["status"], "pod") for pod, details in runpod_pods().items()]
    return _without_labels("RunPod", name, rows)


def _without_labels(provider: str, name: str, rows: list[tuple[str, str | None, str, str]]) -> Json:
    """The id, name, state and type of each machine, by its name: CLUSTER-head or CLUSTER-worker."""
    found: list[Json] = []
    for machine, called, state, kind in rows:
        cluster, _, role = (called or "").rpartition("-")
        if role in ("head", "worker") and state not in GONE[provider] and fnmatch.fnmatchcase(cluster, name):
            found.append(_machine(machine, _provider(provider, cluster, {}), kind, None, None))
    return {"machines": found, "answered": [provider], "denied": {}, "silent": {}, "labels": False}


def _provider(name: str, cluster: str, config: Json) -> Json:
    return {"name": name, "cluster": cluster, "cluster_on_cloud": cluster, "config": config}


def _machine(machine: str, provider: Json, kind: str, began: float | None, label: str | None) -> Json:
    return {"id": machine, "instance_type": kind, "began": began, "label": label, "provider": provider}


_LISTINGS: dict[str, Callable[[str, str], Json]] = {
    "aws": _on_aws,
    "gcp": _on_gcp,
    "lambda": _on_lambda,
    "runpod": _on_runpod,
}
