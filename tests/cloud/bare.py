"""A machine without SkyPilot, for tests of the link. Runs on a rig's laptop, as their programs do."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from launcher.backends.ssh.link import SshHost, run_on
from launcher.base.errors import LaunchError
from tests.support.waiting import wait_until

_LOGIN = "ubuntu"
SOCKET = "/tmp/answering.sock"
_LOG = "/tmp/answering.log"


def rent(folder: Path) -> tuple[str, SshHost]:
    """A new machine that answers ssh, and its instance id; keys and known hosts go to `folder`."""
    import boto3

    from tests.cloud.provider import AMI

    key = folder / "key"
    if not key.exists():
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    public = key.with_suffix(".pub").read_text().strip()
    cloud_init = f"#cloud-config\nusers:\n- name: {_LOGIN}\n  ssh_authorized_keys: ['{public}']\n"
    ec2: Any = boto3.client("ec2")
    wanted = {"ImageId": AMI, "InstanceType": "m6i.large", "MinCount": 1, "MaxCount": 1}
    made = ec2.run_instances(UserData=cloud_init, **wanted)["Instances"][0]
    host = SshHost(made["PrivateIpAddress"], _LOGIN, key, folder / f"known-{made['InstanceId']}")
    wait_until(lambda: trouble(host) is None, what=lambda: str(trouble(host)))
    return made["InstanceId"], host


def trouble(host: SshHost, bound_seconds: float = 60.0) -> str | None:
    """Why the machine cannot be reached by ssh; None where it can."""
    try:
        run_on(host, "true", bound_seconds=bound_seconds)
    except LaunchError as error:
        return f"{error.message}: {error.why}"
    return None


def answer(host: SshHost) -> None:
    """Start `inside/answering.py` there and wait for its socket."""
    run_on(host, f"setsid python3.11 /opt/rig/inside/answering.py {SOCKET} >{_LOG} 2>&1 </dev/null &")
    wait_until(
        lambda: run_on(host, f"test -S {SOCKET}").returncode == 0,
        what=lambda: run_on(host, f"cat {_LOG}").stdout.decode(),
    )
