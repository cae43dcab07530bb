"""The provider: EC2, IAM and STS as moto serves them, with a machine behind each instance.

    python -m tests.cloud.provider --folder RIG --host 10.77.0.1 --port 5566 --image IMAGE     (inside a rig)

A machine that shuts itself down is stopped. `witness.jsonl` in the folder is its independent, append-only
record of what ran and what was terminated.
`faults/NAME` switch faults on, for as long as the file is there:

    no-capacity         zones: RunInstances is refused there         slow-terminate   seconds it takes
    deny-region         regions: there the account may do nothing, as under an organisation's policy
    create-then-error   RunInstances makes the machine, then fails   refuse-terminate, fail-describe
                        with this error code; SkyPilot repeats what InternalError ends, for ten minutes
    hurry               how many seconds of a machine's own timers pass in one
    lose, preempt       instance ids, once: the machine is gone, or the provider takes it back

Neighbours: `rig.py` starts it, sets faults and reads the witness; `machine.py` makes the machines.
Not here: quotas, security groups, eventual consistency, IAM's rules, boot and download times.
"""

from __future__ import annotations

import argparse
import base64
import functools
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from tests.cloud.machine import Machine, Seed
from tests.support.aws_policy import under_policy

WITNESS = "witness.jsonl"
FAULTS = "faults"
READY = "provider.ready"
AMI = "ami-0slipwaytest0001"
REGIONS = ("us-east-1", "us-west-2")
_NETWORK = "10.77.1."
_ROLE = "skypilot-v1"
_WATCH_SECONDS = 0.1


class Witness:
    """What happened, one JSON object a line, on disk before the answer goes out."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")
        self._lock = threading.Lock()

    def write(self, event: str, **fields: Any) -> None:
        """Append one event."""
        with self._lock:
            self._file.write(json.dumps({"time": time.time(), "event": event, **fields}) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())


class Faults:
    """The faults that are switched on now."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)

    def get(self, name: str) -> str | None:
        """The text of a fault, None when it is off."""
        try:
            return (self._folder / name).read_text().strip()
        except FileNotFoundError:
            return None

    def take(self, name: str) -> list[str]:
        """The words of a fault that happens once."""
        said = self.get(name)
        if said is None:
            return []
        (self._folder / name).unlink()
        return said.split()


class Provider:
    """The machines behind moto's instances, by instance id."""

    def __init__(self, folder: Path, endpoint: str, image: Path, binds: str) -> None:
        self.witness = Witness(folder / WITNESS)
        self.faults = Faults(folder / FAULTS)
        self._folder = folder
        self._endpoint = endpoint
        self._image = image
        self._binds = binds
        self._machines: dict[str, Machine] = {}
        self._answers: dict[str | None, Any] = {}
        self._next_host = 1
        self._lock = threading.Lock()

    def install(self) -> None:
        """Put ourselves behind moto's instances and its request handlers."""
        from moto.ec2.models.instances import Instance
        from moto.ec2.responses.instances import InstanceResponse

        _around(Instance, "__init__", self._make)
        _around(Instance, "terminate", self._ended("terminate"))
        _around(Instance, "stop", self._ended("stop"))
        _around(InstanceResponse, "run_instances", self._run_instances)
        _around(InstanceResponse, "terminate_instances", self._terminate_instances)
        _around(InstanceResponse, "describe_instances", self._describe_instances)
        under_policy(lambda region, action, query: region in (self.faults.get("deny-region") or "").split())

    def _make(self, original: Callable[..., Any], instance: Any, *arguments: Any, **named: Any) -> None:
        original(instance, *arguments, **named)
        zone, kind = instance.placement.zone, instance.instance_type
        if zone in (self.faults.get("no-capacity") or "").split():
            self.witness.write("run-refused", zone=zone, type=kind)
            raise _refusal(
                "InsufficientInstanceCapacity",
                f"We currently do not have sufficient {kind} capacity in the Availability Zone you requested "
                f"({zone}).",
            )
        with self._lock:
            address = f"{_NETWORK}{self._next_host}"
            self._next_host += 1
        card = instance.nics[0]
        card.public_ip = card.private_ip_address = address
        for entry in card.private_ip_addresses or []:
            entry["PrivateIpAddress"] = address
        region = instance.region_name
        self.witness.write("run", id=instance.id, zone=zone, region=region, type=kind, address=address)
        hurry = self.faults.get("hurry") or "1"
        seed = Seed(instance.id, kind, region, *_cloud_init(instance.user_data), hurry)
        folder = self._folder / "machines" / instance.id
        self._machines[instance.id] = Machine(
            seed, address, folder, image=self._image, endpoint=self._endpoint, binds=self._binds
        )

    def _ended(self, event: str) -> Callable[..., Any]:
        def end(original: Callable[..., Any], instance: Any) -> Any:
            machine = self._machines.pop(instance.id, None)
            if machine is not None:
                machine.end()
            answer = original(instance)
            self.witness.write(event, id=instance.id, again=machine is None)
            return answer

        return end

    def _run_instances(self, original: Callable[..., Any], response: Any) -> Any:
        # As EC2 does: a request that is repeated, as boto3 does after an error, makes nothing a second time.
        token = response.querystring.get("ClientToken", [None])[0]
        if token is None or token not in self._answers:
            self._answers[token] = original(response)
        answer = self._answers[token]
        code = self.faults.get("create-then-error")
        if code is not None:
            self.witness.write("run-answer-lost")
            raise _refusal(
                code or "InternalError", "An internal error has occurred after the instance was made."
            )
        return answer

    def _terminate_instances(self, original: Callable[..., Any], response: Any) -> Any:
        seconds = self.faults.get("slow-terminate")
        if seconds is not None:
            time.sleep(float(seconds))
        if self.faults.get("refuse-terminate") is not None:
            self.witness.write("terminate-refused")
            raise _refusal("UnauthorizedOperation", "You are not authorized to perform this operation.")
        return original(response)

    def _describe_instances(self, original: Callable[..., Any], response: Any) -> Any:
        if self.faults.get("fail-describe") is not None:
            self.witness.write("describe-refused")
            raise _refusal("UnauthorizedOperation", "You are not authorized to describe instances.")
        return original(response)

    def watch(self) -> None:
        """What happens to machines without anybody asking."""
        while True:
            for lost in self.faults.take("lose"):
                self._machines.pop(lost).end()
                self.witness.write("lost", id=lost)
            for taken in self.faults.take("preempt"):
                self.witness.write("preempted", id=taken)
                for instance in _instances():
                    if instance.id == taken:
                        instance.terminate()
            for instance in _instances():
                machine = self._machines.get(instance.id)
                if machine is not None and not machine.running:
                    self.witness.write("shut-down", id=instance.id)
                    instance.stop()  # as EC2 does, unless it was asked to terminate then
            time.sleep(_WATCH_SECONDS)


def _instances() -> list[Any]:
    """All of the account's, in every region."""
    from moto.ec2.models import ec2_backends

    backends = list(ec2_backends["123456789012"].values())
    return [instance for backend in backends for instance in backend.all_instances()]


def _around(owner: type, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a method by `wrapper(original, self, …)`."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def method(self: Any, *arguments: Any, **named: Any) -> Any:
        return wrapper(original, self, *arguments, **named)

    setattr(owner, name, method)


def _refusal(code: str, message: str) -> Exception:
    from moto.ec2.exceptions import EC2ClientError

    return EC2ClientError(code, message)


def _cloud_init(user_data: Any) -> tuple[str, list[str], list[str]]:
    """The first user of the instance's cloud-config and its keys; and what runs last at its boot."""
    text = user_data if isinstance(user_data, str) else getattr(user_data, "text", None) or str(user_data)
    if "#cloud-config" not in text:
        text = base64.b64decode(text).decode()
    config = yaml.safe_load(text)
    user = config["users"][0]
    return user["name"], user["ssh_authorized_keys"], config.get("runcmd") or []


def _write_amis(path: Path) -> None:
    """The one image there is, with the fields moto wants."""
    ami = {
        "ami_id": AMI, "state": "available", "public": True, "owner_id": "123456789012", "sriov": "simple",
        "image_location": "slipway/test", "root_device_type": "ebs", "root_device_name": "/dev/sda1",
        "description": "a machine of namespaces", "image_type": "machine", "platform": None,
        "architecture": "x86_64", "name": "slipway-test", "virtualization_type": "hvm", "hypervisor": "xen",
    }  # fmt: skip
    path.write_text(json.dumps([ami]))


def _furnish(endpoint: str) -> None:
    """What an AWS account has: SkyPilot's role, and in each region a default VPC with a way out."""
    import boto3

    def client(service: str, region: str) -> Any:
        return boto3.client(
            service,
            endpoint_url=endpoint,
            region_name=region,
            aws_access_key_id="testing",
            aws_secret_access_key="testing",
        )

    iam = client("iam", REGIONS[0])
    iam.create_role(RoleName=_ROLE, AssumeRolePolicyDocument="{}")
    iam.create_instance_profile(InstanceProfileName=_ROLE)
    iam.add_role_to_instance_profile(InstanceProfileName=_ROLE, RoleName=_ROLE)
    for region in REGIONS:
        ec2 = client("ec2", region)
        is_default = [{"Name": "isDefault", "Values": ["true"]}]
        vpc = ec2.describe_vpcs(Filters=is_default)["Vpcs"][0]["VpcId"]
        gateway = ec2.create_internet_gateway()["InternetGateway"]["InternetGatewayId"]
        ec2.attach_internet_gateway(InternetGatewayId=gateway, VpcId=vpc)
        main = [
            {"Name": "vpc-id", "Values": [vpc]},
            {"Name": "association.main", "Values": ["true"]},
        ]
        table = ec2.describe_route_tables(Filters=main)["RouteTables"][0]["RouteTableId"]
        ec2.create_route(RouteTableId=table, DestinationCidrBlock="0.0.0.0/0", GatewayId=gateway)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--image", type=Path, required=True)
    parser.add_argument("--binds", default="", help="SOURCE:TARGET lines, mounted read-only into machines")
    options = parser.parse_args()
    _write_amis(options.folder / "amis.json")
    os.environ["MOTO_AMIS_PATH"] = str(options.folder / "amis.json")
    from moto.server import ThreadedMotoServer

    endpoint = f"http://{options.host}:{options.port}"
    provider = Provider(options.folder, endpoint, options.image, options.binds)
    provider.install()
    ThreadedMotoServer(ip_address=options.host, port=options.port, verbose=False).start()
    _furnish(endpoint)
    (options.folder / READY).touch()
    provider.watch()


if __name__ == "__main__":
    main()
