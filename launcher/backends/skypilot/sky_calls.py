"""SkyPilot's calls, in a process of their own: a cluster's launch, its end, its entry in SkyPilot's state.

    python -m launcher.backends.skypilot.sky_calls      a JSON request a line on stdin, a JSON answer a line
    on stdout
        --ahead the modules that end a cluster are imported before the first request

A process of its own, because SkyPilot reads HOME and its variables when it is imported, and its home is not
ours; because importing it takes 2 to 4 s; and because a call of it that hangs can then be left behind.
SkyPilot's output goes to stderr. Neighbours: `sky_prices.py`, `sky_providers.py`,
`sky_machines_by_name.py`, `sky_aws_permissions.py` and `sky_identity.py` have its other calls;
`sky_process.py` is the other end, `cloud_machine.py` uses that. Only these and `sky_server.py` import `sky`.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from launcher.backends.skypilot.sky_aws_permissions import rent_refused
from launcher.backends.skypilot.sky_identity import account
from launcher.backends.skypilot.sky_machines_by_name import machines_named
from launcher.backends.skypilot.sky_prices import fetch, machines_with, offers, offers_at
from launcher.backends.skypilot.sky_providers import LISTED_BY_NAME, candidates, instances, terminate
from runtime.shared import imports

Json = dict[str, Any]


def version() -> Json:
    """SkyPilot's version. It also triggers the import: called early, the import is over when it matters."""
    import sky

    # Where SkyPilot is not installed, a folder named `sky` imports as an empty package.
    if not hasattr(sky, "launch"):
        raise ModuleNotFoundError("No module named 'sky'")
    return {"version": sky.__version__}


def launch(
    task_file: str,
    cluster: str,
    infra: list[str],
    gpus: str,
    disk_gb: int | None,
    idle_minutes: int,
    labels: dict[str, str],
    max_price_per_hour: float | None = None,
    instance_type: str | None = None,
) -> Json:
    """The first launch of a cluster: an empty task, so that autodown is armed as soon as it is up."""
    from sky.skylet.autostop_lib import AutostopWaitFor

    import sky

    import_what_ends()
    if max_price_per_hour is not None:
        infra = _within(max_price_per_hour, infra, gpus)
    task = sky.Task.from_yaml(task_file)
    wanted: Json = {"accelerators": gpus, "disk_size": disk_gb, "max_hourly_cost": max_price_per_hour}
    wanted["labels"] = labels  # if a provider has none, they are left out
    wanted["instance_type"] = instance_type
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
    found = cluster_status(cluster)
    if found is None:
        raise RuntimeError(f"SkyPilot launched {cluster} but has no record of it")
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
        found = offers_at(place, gpu, number, {"gcp": machines_with("gcp", gpu, number)})
        places += [offer["infra"] for offer in found if offer["price_per_hour"] <= max_price_per_hour]
    if not places:
        where = ", ".join(infra)
        raise exceptions.ResourcesUnavailableError(f"{gpus} cost more than {max_price_per_hour}/h on {where}")
    return list(dict.fromkeys(places))


def import_what_ends() -> None:
    """Import everything that ending a cluster needs, before there is one: after an upgrade of SkyPilot in
    mid-run, this process must not load half of the new version."""
    from sky.adaptors import aws
    from sky.backends import backend_utils
    from sky.catalog import common
    from sky.provision.aws import config
    from sky.provision.constants import TAG_RAY_CLUSTER_NAME
    from sky.provision.gcp import instance_utils
    from sky.provision.lambda_cloud import lambda_utils
    from sky.provision.runpod import utils
    from sky.server.requests import requests
    from sky.utils import annotations, common_utils, registry

    from sky import clouds, core, exceptions, global_user_state, provision

    _ = (aws, backend_utils, common, TAG_RAY_CLUSTER_NAME, annotations, common_utils, registry, requests)
    _ = (config, instance_utils, lambda_utils, utils)
    _ = (clouds, core, exceptions, global_user_state, provision)


def down(cluster: str, by_server: bool) -> Json:
    """End the cluster; nothing happens when SkyPilot knows of none.

    `by_server`: the API server does it, which also ends a launch that it works at. Otherwise this process
    does what a server would that begins for this request, and needs none: nothing else may work at the
    cluster.
    """
    from sky.server.requests import requests
    from sky.utils import annotations

    import sky
    from sky import core, exceptions

    try:
        if by_server:
            sky.stream_and_get(sky.down(cluster))
        else:
            # It would signal the processes of an earlier server's requests, by ids that others may have now.
            requests.reset_db_and_logs()
            annotations.clear_request_level_cache()  # credentials, as they were when the run began
            core.down(cluster)
    except exceptions.ClusterDoesNotExist:
        return {"known": False}
    return {"known": True}


def cluster_status(cluster: str) -> Json | None:
    """SkyPilot's own entry for a cluster: its ssh host, its place, how its provider is asked.

    None if there is none. Asks neither the API server nor the provider.
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
            # As in `candidates`: a provider that is asked without a region is one place, wherever the machine
            # is.
            "config": {} if repr(resources.cloud).lower() in LISTED_BY_NAME else config,
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


_OFFERED = (
    version, offers, fetch, launch, down, cluster_status, candidates, instances, terminate, machines_named,
    rent_refused, account,
)  # fmt: skip
_CALLS: dict[str, Callable[..., Json | None]] = {call.__name__: call for call in _OFFERED}


def main() -> None:
    answers, requests = os.fdopen(os.dup(1), "w"), os.fdopen(os.dup(0))
    os.dup2(2, 1)
    # A child that asks for a code on stdin reads its end at once.
    nobody = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nobody, 0)
    os.close(nobody)
    with imports.collecting_nothing():
        try:
            version()
            if "--ahead" in sys.argv[1:]:
                import_what_ends()
        except Exception:  # noqa: BLE001 - each call raises it again, for its caller
            traceback.print_exc()
    for line in requests:
        request = json.loads(line)
        try:
            version()  # without SkyPilot every call raises the same error
            answer: Json = {"answer": _CALLS[request["call"]](**request["arguments"])}
        except BaseException as error:  # noqa: BLE001 - the other end judges SkyPilot's errors
            traceback.print_exc()
            kinds = [kind.__name__ for kind in type(error).__mro__[:-2]]
            answer = {"error": {"kinds": kinds, "text": str(error)}}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
