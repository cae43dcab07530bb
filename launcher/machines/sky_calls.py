"""SkyPilot's calls, in a process of their own: the only importer of `sky`.

    python -m launcher.machines.sky_calls      a JSON request a line on stdin, a JSON answer a line on stdout

A process of its own, because SkyPilot reads HOME and its variables when it is imported, and its home is not
ours; because importing it takes 2 to 4 s; and because a call of it that hangs can then be left behind.
What SkyPilot prints goes to stderr. Neighbours: `sky_process.py` is the other end, `cloud.py` uses that.
"""

from __future__ import annotations

import json
import os
import re
import sys
import traceback
from collections.abc import Callable
from typing import Any

Json = dict[str, Any]

_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# How SkyPilot shows a line of a job: (setup, pid=123) the line
_AROUND = 8
_OF_A_JOB = re.compile(r"\([^)]*pid=\d+[^)]*\) ?(.*)")


def version() -> Json:
    """SkyPilot's version. Also what costs the import: asked early, it is over when it matters."""
    import sky

    # Where SkyPilot is not installed, a folder named `sky` imports as an empty package.
    if not hasattr(sky, "launch"):
        raise ModuleNotFoundError("No module named 'sky'")
    return {"version": sky.__version__}


def launch(
    task_file: str, cluster: str, infra: list[str], gpus: str, disk_gb: int | None, idle_minutes: int
) -> Json:
    """The first launch of a cluster: an empty task, so that autodown is armed as soon as it is up."""
    from sky.skylet.autostop_lib import AutostopWaitFor

    import sky

    task = sky.Task.from_yaml(task_file)
    choices = [sky.Resources(infra=one, accelerators=gpus, disk_size=disk_gb) for one in infra]
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


def run_job(cluster: str, name: str, run: str, workdir: str | None) -> Json:
    """Bring the folder `workdir` there, submit the script `run` as a job; its id. Never a second launch:
    that would silently re-arm autodown so that a running job holds it back."""
    import sky

    job, _ = sky.stream_and_get(sky.exec(sky.Task(name=name, run=run, workdir=workdir), cluster))
    return {"job": job}


def job_state(cluster: str, job: int) -> Json:
    """SkyPilot's word for where a job stands, such as RUNNING or FAILED; None when it knows of none."""
    import sky

    state = sky.get(sky.job_status(cluster, [job])).get(job)
    return {"state": None if state is None else state.value}


def job_log(cluster: str, job: int, lines: int) -> Json:
    """The last lines a job printed itself; SkyPilot's own around them are left out."""
    import io

    import sky

    text = io.StringIO()
    sky.tail_logs(cluster, job, follow=False, tail=lines + _AROUND, output_stream=text)
    plain = (_COLOUR.sub("", line).rstrip() for line in text.getvalue().splitlines())
    said = [found[1] for line in plain if (found := _OF_A_JOB.match(line))]
    return {"lines": said[-lines:]}


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


_OFFERED = (version, launch, run_job, job_state, job_log, down, standing, instances, terminate)
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
