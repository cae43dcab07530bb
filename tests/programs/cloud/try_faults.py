"""Switches the provider's faults on and off and looks at what becomes of machines; its witness sees it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError

from launcher.backends.ssh.link import SshHost, run_on
from tests.cloud import bare
from tests.support.waiting import wait_until

HERE = Path.cwd()
FAULTS = HERE.parent / "faults"
EC2: Any = boto3.client("ec2", config=Config(retries={"max_attempts": 1}))
WAIT_SECONDS = 240.0


def switch_on(name: str, text: str = "") -> None:
    """Whole at once: the provider may take it at any moment."""
    aside = FAULTS / f".{name}"
    aside.write_text(text)
    aside.rename(FAULTS / name)


def switch_off(name: str) -> None:
    (FAULTS / name).unlink()


def states(instance: str) -> list[str]:
    found = EC2.describe_instances(InstanceIds=[instance])["Reservations"][0]["Instances"]
    return [one["State"]["Name"] for one in found]


def refused(do: Callable[[], object]) -> str | None:
    """The code that a call was refused with; None when it was not."""
    try:
        do()
    except ClientError as error:
        return error.response.get("Error", {}).get("Code")
    return None


def unreachable(host: SshHost) -> bool:
    return bare.trouble(host, bound_seconds=3) is not None


def refuse_and_delay(first: str, host: SshHost) -> None:
    switch_on("fail-describe")
    assert refused(lambda: states(first)) == "UnauthorizedOperation"
    switch_off("fail-describe")
    switch_on("refuse-terminate")
    assert refused(lambda: EC2.terminate_instances(InstanceIds=[first])) == "UnauthorizedOperation"
    switch_off("refuse-terminate")
    assert states(first) == ["running"] and run_on(host, "true").returncode == 0
    switch_on("slow-terminate", "2")
    begun = time.monotonic()
    EC2.terminate_instances(InstanceIds=[first])
    assert time.monotonic() - begun >= 2
    switch_off("slow-terminate")
    assert states(first) == ["terminated"] and unreachable(host)


def lose(instance: str, host: SshHost) -> None:
    """It breaks, and goes on costing money."""
    switch_on("lose", instance)
    wait_until(lambda: unreachable(host), WAIT_SECONDS, "the machine to be lost")
    assert states(instance) == ["running"]


def take_back() -> None:
    instance, host = bare.rent(HERE)
    switch_on("preempt", instance)
    wait_until(
        lambda: states(instance) != ["running"],
        WAIT_SECONDS,
        "the machine to be taken back",
    )
    assert unreachable(host)


def rent_in_vain() -> None:
    zones = [zone["ZoneName"] for zone in EC2.describe_availability_zones()["AvailabilityZones"]]
    switch_on("no-capacity", " ".join(zones))
    assert refused(lambda: bare.rent(HERE)) == "InsufficientInstanceCapacity"
    switch_off("no-capacity")
    switch_on("create-then-error")
    assert refused(lambda: bare.rent(HERE)) == "InternalError"


def main() -> None:
    first, host = bare.rent(HERE)
    second, other = bare.rent(HERE)
    assert run_on(host, "hostname").stdout != run_on(other, "hostname").stdout
    assert run_on(host, "ip route").stdout.split()[0] == b"10.77.0.0/16"
    assert run_on(host, "timeout 3 bash -c 'exec 3<>/dev/tcp/1.1.1.1/443'").returncode != 0
    refuse_and_delay(first, host)
    lose(second, other)
    take_back()
    rent_in_vain()
    print("done")


if __name__ == "__main__":
    main()
