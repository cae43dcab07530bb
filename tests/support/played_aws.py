"""AWS as moto serves it, on a port of this computer: its lists and its refusals, and no machine.

The account's policy: whole regions in `denied`, and what `refuses` says of a request; `expired` says of
which access keys the session has ended. Neighbours: `aws_policy.py` is how it refuses; the test cloud's
`provider.py` has real machines behind the same API.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.aws_policy import Expired, Refuses, under_policy
from tests.support.environment import REPOSITORY

_CATALOGS = REPOSITORY / "tests" / "cloud" / "catalogs"


class PlayedAws:
    """Up when made; `close` it. `asked` are the calls of EC2 that came: region and action."""

    def __init__(self) -> None:
        from moto.server import ThreadedMotoServer

        self.denied: set[str] = set()
        self.refuses: Refuses = lambda region, action, query: False
        self.expired: Expired = lambda key: False
        self.asked: list[tuple[str, str]] = []
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._server.start()
        host, port = self._server.get_host_and_port()
        self.endpoint = f"http://{host}:{port}"
        self._lift = under_policy(self._policy, lambda key: self.expired(key))

    def _policy(self, region: str, action: str, query: dict[str, Any]) -> bool:
        self.asked.append((region, action))
        return region in self.denied or self.refuses(region, action, query)

    def forget(self) -> None:
        """As new: no machine, no policy."""
        from moto.ec2.models import ec2_backends

        self.denied, self.refuses = set(), lambda region, action, query: False
        self.expired = lambda key: False
        self.asked.clear()
        for backends in ec2_backends.values():
            backends.clear()

    def furnish(self, home: Path) -> None:
        """An account in a user's home, and the catalogs of the test cloud."""
        import shutil

        (home / ".aws").mkdir(parents=True)
        (home / ".aws" / "config").write_text(
            f"[default]\nregion = us-east-1\nendpoint_url = {self.endpoint}\n"
        )
        keys = "aws_access_key_id = testing\naws_secret_access_key = testing\n"
        (home / ".aws" / "credentials").write_text(f"[default]\n{keys}")
        shutil.copytree(_CATALOGS, home / ".sky" / "catalogs")

    def add_account(self, home: Path, profile: str, account: str) -> None:
        """Another account, for a profile of this user."""
        import boto3

        keys = {"aws_access_key_id": "testing", "aws_secret_access_key": "testing"}
        sts: Any = boto3.client("sts", region_name="us-east-1", endpoint_url=self.endpoint, **keys)
        role = f"arn:aws:iam::{account}:role/user"
        given = sts.assume_role(RoleArn=role, RoleSessionName="user")["Credentials"]
        with (home / ".aws" / "config").open("a") as config:
            config.write(f"[profile {profile}]\nregion = us-east-1\nendpoint_url = {self.endpoint}\n")
        with (home / ".aws" / "credentials").open("a") as credentials:
            credentials.write(
                f"[{profile}]\naws_access_key_id = {given['AccessKeyId']}\n"
                f"aws_secret_access_key = {given['SecretAccessKey']}\n"
                f"aws_session_token = {given['SessionToken']}\n"
            )

    def rent(self, region: str, cluster: str) -> str:
        """A machine of a cluster; its id."""
        import boto3

        keys = {"aws_access_key_id": "testing", "aws_secret_access_key": "testing"}
        ec2: Any = boto3.client("ec2", region_name=region, endpoint_url=self.endpoint, **keys)
        tags = [{"ResourceType": "instance", "Tags": [{"Key": "ray-cluster-name", "Value": cluster}]}]
        made = ec2.run_instances(
            ImageId="ami-12c6146b", InstanceType="t3.micro", MinCount=1, MaxCount=1, TagSpecifications=tags
        )
        return made["Instances"][0]["InstanceId"]

    def running(self, region: str) -> int:
        """How many machines there are, of the first account."""
        from moto.core.models import DEFAULT_ACCOUNT_ID
        from moto.ec2.models import ec2_backends

        found = ec2_backends[DEFAULT_ACCOUNT_ID][region].all_running_instances()
        return len(list(found))

    def state(self, region: str, machine: str) -> str:
        """Of a machine: "running", "terminated", …"""
        from moto.core.models import DEFAULT_ACCOUNT_ID
        from moto.ec2.models import ec2_backends

        return ec2_backends[DEFAULT_ACCOUNT_ID][region].get_instance(machine).state

    def close(self) -> None:
        """It is gone, and moto is as it was."""
        self._lift()
        self._server.stop()
