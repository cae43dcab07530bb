"""The provider: machines behind instances, faults on demand, and a witness that saw it all."""

from __future__ import annotations

import sys
import textwrap

import pytest

from tests.cloud.rig import REPOSITORY, Rig

pytestmark = pytest.mark.slow

_PROGRAM = """
import time
from pathlib import Path
import boto3
from botocore.config import Config
from botocore.exceptions import ClientError
from launcher.errors import LaunchError
from launcher.machines.link import run_on
from tests.cloud import bare
here, faults = Path.cwd(), Path.cwd().parent / "faults"
ec2 = boto3.client("ec2", config=Config(retries={"max_attempts": 1}))
def states(instance):
    found = ec2.describe_instances(InstanceIds=[instance])["Reservations"][0]["Instances"]
    return [one["State"]["Name"] for one in found]
def refused(do):
    try:
        do()
    except ClientError as error:
        return error.response["Error"]["Code"]
def unreachable(host):
    try:
        run_on(host, "true", bound_seconds=3)
    except LaunchError:
        return True

first, host = bare.rent(here)
second, other = bare.rent(here)
assert run_on(host, "hostname").stdout != run_on(other, "hostname").stdout
assert run_on(host, "ip route").stdout.split()[0] == b"10.77.0.0/16"
assert run_on(host, "timeout 3 bash -c 'exec 3<>/dev/tcp/1.1.1.1/443'").returncode != 0

(faults / "fail-describe").touch()
assert refused(lambda: states(first)) == "UnauthorizedOperation"
(faults / "fail-describe").unlink()
(faults / "refuse-terminate").touch()
assert refused(lambda: ec2.terminate_instances(InstanceIds=[first])) == "UnauthorizedOperation"
(faults / "refuse-terminate").unlink()
assert states(first) == ["running"] and run_on(host, "true").returncode == 0
(faults / "slow-terminate").write_text("2")
begun = time.monotonic()
ec2.terminate_instances(InstanceIds=[first])
assert time.monotonic() - begun >= 2
(faults / "slow-terminate").unlink()
assert states(first) == ["terminated"] and unreachable(host)

(faults / "lose").write_text(second)
while not unreachable(other):
    time.sleep(0.1)
assert states(second) == ["running"]

third, taken = bare.rent(here)
(faults / "preempt").write_text(third)
while states(third) == ["running"]:
    time.sleep(0.1)
assert unreachable(taken)

zones = [zone["ZoneName"] for zone in ec2.describe_availability_zones()["AvailabilityZones"]]
(faults / "no-capacity").write_text(" ".join(zones))
assert refused(lambda: bare.rent(here)) == "InsufficientInstanceCapacity"
(faults / "no-capacity").unlink()
(faults / "create-then-error").touch()
assert refused(lambda: bare.rent(here)) == "InternalError"
print("done")
"""


def test_faults_come_and_go_and_the_witness_saw_them(rig: Rig) -> None:
    environ = rig.environ(PYTHONPATH=str(REPOSITORY))
    said = rig.run([sys.executable, "-c", textwrap.dedent(_PROGRAM)], seconds=120, environ=environ).ok()
    assert said.endswith("done\n")
    ran = [one["id"] for one in rig.witness("run")]
    first, second, third, fourth = ran
    refusals = ["describe-refused", "terminate-refused", "run-refused", "run-answer-lost"]
    assert [len(rig.witness(event)) for event in refusals] == [1, 1, 1, 1]
    assert [one["id"] for one in rig.witness("lost")] == [second]
    assert [one["id"] for one in rig.witness("terminate")] == [first, third]
    # What costs money: the machine that broke, and the one whose making was answered with an error.
    assert rig.alive() == [second, fourth]
