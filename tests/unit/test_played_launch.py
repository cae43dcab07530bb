"""What SkyPilot's own code asks GCP, Lambda and RunPod for when a run is launched, and where it tries next.

The providers are played as in test_played_lists.py; a launch goes as far as there are machines, nobody logs
in to them. SkyPilot's API server is left out: what it would run is called in SkyPilot's place.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.backends.skypilot.cluster_request import ClusterRequest
from launcher.backends.skypilot.provision import Provisioning
from launcher.base.errors import CapacityError, LaunchError
from launcher.types.clouds import clouds_of
from tests.support.played_https import Answer
from tests.support.played_sky import PlayedProcess, PlayedSky, on_cloud

pytestmark = [pytest.mark.process, pytest.mark.slow]

_FIREWALL = r"(POST|PUT|PATCH) \S*firewall"


def test_lambda_is_asked_for_one_machine_of_the_runs_name(played_sky: PlayedSky) -> None:
    cluster = played_sky.new_cluster()
    found = played_sky.launch(cluster, "lambda/us-east-1")
    asked = [one.body for one in played_sky.lambda_.asked if "launch" in one.path]
    (key,) = played_sky.lambda_.keys
    assert asked == [
        {
            "region_name": "us-east-1", "instance_type_name": "gpu_1x_h100", "quantity": 1,
            "name": f"{on_cloud(cluster)}-head", "ssh_key_names": [key["name"]],
        }
    ]  # fmt: skip
    assert key["public_key"].startswith("ssh-") and "PRIVATE" not in str(key)
    assert (found["where"], found["price_per_hour"]) == ("Lambda/us-east-1", 2.49)
    assert played_sky.lambda_.count(_FIREWALL) == 0, "no port is opened"


def test_runpod_is_asked_for_one_pod_that_is_no_spot(played_sky: PlayedSky) -> None:
    cluster = played_sky.new_cluster()
    found = played_sky.launch(cluster, "runpod")
    (asked,) = played_sky.runpod.deployed
    assert asked["name"] == f"{on_cloud(cluster)}-head"
    assert (asked["gpuTypeId"], asked["gpuCount"]) == ("NVIDIA H100 PCIe", "1")
    assert (asked["cloudType"], asked["containerDiskInGb"]) == ("SECURE", "200")
    assert played_sky.runpod.count("podFindAndDeployOnDemand") == 1
    assert played_sky.runpod.count("podRentInterruptable") == 0
    # ssh, and what SkyPilot itself opens on every pod: Ray's dashboard and Ray, through RunPod's proxy.
    assert asked["ports"] == "22/tcp,8266/http,6380/http"
    assert found["price_per_hour"] == 2.39


def test_gcp_is_asked_for_one_machine_whose_disk_goes_with_it(played_sky: PlayedSky) -> None:
    cluster = played_sky.new_cluster()
    found = played_sky.launch(cluster, "gcp/us-central1")
    (asked,) = played_sky.gcp.inserted
    (machine,), properties = asked["perInstanceProperties"], asked["instanceProperties"]
    assert machine.startswith(f"{on_cloud(cluster)}-head-") and asked["count"] == 1
    labels = {"ray-cluster-name": on_cloud(cluster), "slipway-home": "0123"}
    assert labels.items() <= properties["labels"].items()
    (disk,) = properties["disks"]
    assert (disk["autoDelete"], disk["initializeParams"]["diskSizeGb"]) == (True, 200)
    assert properties["guestAccelerators"] == [{"acceleratorType": "nvidia-h100-80gb", "acceleratorCount": 1}]
    (account,) = properties["serviceAccounts"]
    assert account["email"].startswith("skypilot-v1@"), "by which the machine can end itself"
    assert properties["scheduling"] == {"onHostMaintenance": "TERMINATE"}, "no spot"
    assert played_sky.gcp.count(_FIREWALL) == 0, "no port is opened"
    # The GPU's price and its host's, which Google bills apart.
    assert (found["where"], found["price_per_hour"]) == ("GCP/us-central1/us-central1-a", 11.0)


def test_each_region_of_lambda_is_tried_before_it_is_sold_out(played_sky: PlayedSky) -> None:
    cluster = played_sky.new_cluster()
    played_sky.lambda_.stock = {"us-west-1"}
    assert played_sky.launch(cluster, "lambda")["where"] == "Lambda/us-west-1"
    assert len(played_sky.lambda_.machines()) == 1


def test_each_country_of_runpod_is_tried_before_it_is_sold_out(played_sky: PlayedSky) -> None:
    cluster = played_sky.new_cluster()
    played_sky.runpod.stock = {"US"}
    assert played_sky.launch(cluster, "runpod")["where"] == "RunPod/US/US-KS-2"
    assert [one["countryCode"] for one in played_sky.runpod.deployed] == ["CA", "US"]
    assert len(played_sky.runpod.machines()) == 1


def test_each_zone_of_gcp_is_tried_before_it_is_sold_out(played_sky: PlayedSky) -> None:
    cluster = played_sky.new_cluster()
    played_sky.gcp.stock = {"us-central1-b"}
    assert played_sky.launch(cluster, "gcp")["where"] == "GCP/us-central1/us-central1-b"
    assert [one["zone"] for one in played_sky.gcp.inserted] == ["us-central1-a", "us-central1-b"]


@pytest.mark.parametrize("cloud", ["gcp", "lambda", "runpod"])
def test_g01_a_cloud_that_is_sold_out_leaves_no_machine(played_sky: PlayedSky, cloud: str) -> None:
    cluster = played_sky.new_cluster()
    for one in (played_sky.gcp, played_sky.lambda_, played_sky.runpod):
        one.stock = set()
    with pytest.raises(CapacityError):
        played_sky.launch(cluster, cloud)
    assert played_sky.played[cloud].machines() == [] == played_sky.listed(cloud, cluster)


@pytest.mark.parametrize("cloud", ["gcp", "lambda", "runpod"])
def test_g11_above_the_most_it_may_cost_no_provider_is_asked_for_a_machine(
    played_sky: PlayedSky, cloud: str
) -> None:
    cluster = played_sky.new_cluster()
    with pytest.raises(LaunchError):
        played_sky.launch(cluster, cloud, max_price_per_hour=1.0)
    assert played_sky.played[cloud].machines() == []
    assert (played_sky.gcp.inserted, played_sky.runpod.deployed) == ([], [])
    assert played_sky.lambda_.count("/launch ") == 0


def test_g01_a_machine_made_by_a_launch_that_failed_is_ended_before_the_next_zone(
    played_sky: PlayedSky,
) -> None:
    cluster = played_sky.new_cluster()
    played_sky.gcp.stock, played_sky.gcp.makes_and_fails = {"us-central1-b"}, True
    found = played_sky.launch(cluster, "gcp")
    assert found["where"] == "GCP/us-central1/us-central1-b"
    assert [zone for zone, _ in played_sky.gcp.instances] == ["us-central1-b"]


def test_g01_where_that_machine_cannot_be_ended_no_other_zone_is_tried(played_sky: PlayedSky) -> None:
    cluster = played_sky.new_cluster()
    played_sky.gcp.stock, played_sky.gcp.makes_and_fails = {"us-central1-b"}, True
    denied = {"error": {"code": 403, "message": "denied", "errors": [{"reason": "forbidden"}]}}
    played_sky.gcp.fail(played_sky.gcp.ending, Answer(denied, 403))
    with pytest.raises(LaunchError):
        played_sky.launch(cluster, "gcp")
    (left,) = played_sky.gcp.machines()
    assert [one["zone"] for one in played_sky.gcp.inserted] == ["us-central1-a"]
    assert played_sky.listed("gcp", cluster) == [left], "whatever the books say, its zone is asked"


def test_g16_the_next_cloud_in_the_order_of_our_prices_is_tried_by_skypilot_itself(
    played_sky: PlayedSky, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In homes that show SkyPilot one cloud each, as a run has them: nothing here outlives the run."""
    cluster = played_sky.new_cluster()
    monkeypatch.setenv("HOME", str(played_sky.user_home))
    asked = {"gpu": "H100", "count": 1, "infra": ["gcp", "lambda", "runpod"]}
    offers = played_sky.sky.call("offers", 300.0, **asked)["offers"]
    infra = [offer["infra"] for offer in offers]
    assert clouds_of(infra) == ["runpod", "lambda", "gcp"], "the cheapest first"
    played_sky.runpod.stock, played_sky.lambda_.stock = set(), set()

    home = played_sky.home_in(tmp_path / "sky", infra)
    sky = PlayedProcess(home, tmp_path / "skypilot.log")
    order = ClusterRequest(cluster, infra, "H100:1", 200, 10, None, {"slipway-home": "0123"})
    said: list[str] = []
    told: list[list[str]] = []
    try:
        found = Provisioning(order, home, sky, told.append, said.append, lambda line: None).run()
    finally:
        sky.end()
    assert found["where"] == "GCP/us-central1/us-central1-a"
    assert found["price_per_hour"] == offers[-1]["price_per_hour"]
    assert [line.partition(":")[0] for line in said] == ["runpod", "lambda"]
    assert said[0].endswith("lambda is next") and said[1].endswith("gcp is next")
    assert played_sky.runpod.machines() == played_sky.lambda_.machines() == [] and all(told)
