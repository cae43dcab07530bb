"""A machine without SkyPilot, for tests of the link. Runs on a rig's laptop, as their programs do."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

from launcher.errors import LaunchError
from launcher.machines.link import Host, run_on

_LOGIN = "ubuntu"
SOCKET = "/tmp/answering.sock"


def rent(folder: Path) -> tuple[str, Host]:
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
    host = Host(made["PrivateIpAddress"], _LOGIN, key, folder / f"known-{made['InstanceId']}")
    bound = time.monotonic() + 20
    while True:
        try:
            run_on(host, "true")
            return made["InstanceId"], host
        except LaunchError:
            if time.monotonic() > bound:
                raise
            time.sleep(0.1)


def answer(host: Host) -> None:
    """Start `inside/answering.py` there and wait for its socket."""
    start = f"setsid python3.11 /opt/rig/inside/answering.py {SOCKET} >/tmp/answering.log 2>&1 </dev/null &"
    wait = (
        f"for i in $(seq 100); do test -S {SOCKET} && exit 0; sleep 0.1; done; cat /tmp/answering.log; exit 1"
    )
    done = run_on(host, f"{start} {wait}")
    assert done.returncode == 0, done.stdout.decode()
