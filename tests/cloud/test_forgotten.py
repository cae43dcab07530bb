"""A machine that SkyPilot has forgotten: found by the provider's tags, ended there. No API server runs."""

from __future__ import annotations

import sys
import textwrap

import pytest

from tests.cloud.rig import REPOSITORY, Rig

pytestmark = pytest.mark.slow

_PROGRAM = """
from pathlib import Path
import boto3
from launcher.machines.sky_home import SkyHome
from launcher.machines.sky_process import SkyProcess
from tests.cloud import bare
here = Path.cwd()
mine, _ = bare.rent(here)
strangers, _ = bare.rent(here)
ec2 = boto3.client("ec2")
for instance, cluster in ((mine, "slip-0123abcd-0123abcd"), (strangers, "theirs-0123abcd")):
    ec2.create_tags(Resources=[instance], Tags=[{"Key": "ray-cluster-name", "Value": cluster}])
home = SkyHome(here / "skypilot", ["aws"], "0123abcd")
home.make()
sky = SkyProcess(home, here / "skypilot.log")
group = {"GroupName": "sky-sg", "ManagedBySkyPilot": True}
config = {"region": "us-east-1", "security_group": group}
provider = {
    "name": "AWS", "cluster": "slip-0123abcd", "cluster_on_cloud": "slip-0123abcd-0123abcd", "config": config
}
assert sky.call("standing", 60.0, cluster="slip-0123abcd") is None
assert sky.call("instances", 60.0, provider=provider) == {"instances": [mine]}
sky.call("terminate", 60.0, provider=provider)
assert sky.call("instances", 60.0, provider=provider) == {"instances": []}
sky.end()
home.remove()
print(mine, strangers)
"""


def test_a_forgotten_machine_is_ended_at_the_provider_and_a_strangers_is_left_alone(rig: Rig) -> None:
    environ = rig.environ(PYTHONPATH=str(REPOSITORY))
    said = rig.run([sys.executable, "-c", textwrap.dedent(_PROGRAM)], seconds=120, environ=environ).ok()
    mine, strangers = said.split()[-2:]
    assert [one["id"] for one in rig.witness("terminate")] == [mine]
    assert rig.alive() == [strangers]
