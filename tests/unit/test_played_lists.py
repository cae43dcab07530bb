"""Which machines we take to be there, by the lists of GCP, Lambda and RunPod: SkyPilot's own code asks them.

The providers are played at the HTTP boundary (`tests/support/played_sky.py`), from their API references. No
account with any of them was used, and none of their machines was ever rented.
"""

from __future__ import annotations

import pytest

from launcher.backends.skypilot.cluster_request import ClusterRequest
from launcher.backends.skypilot.provider_listings import OtherAccountError, ProviderListings
from launcher.base.errors import LaunchError
from tests.support import played_gcp, played_lambda
from tests.support.played_https import Answer
from tests.support.played_sky import ASK_SECONDS, PlayedSky, on_cloud

pytestmark = pytest.mark.process

# Every state of each provider's reference, and one that nobody knows yet.
_THERE = {
    "gcp": (
        "PROVISIONING", "STAGING", "RUNNING", "REPAIRING", "STOPPING", "STOPPED", "SUSPENDING", "SUSPENDED",
        "TERMINATED", "PENDING", "PENDING_STOP", "HIBERNATING",
    ),
    "lambda": ("booting", "active", "unhealthy", "preempted", "hibernating"),
    "runpod": ("CREATED", "RUNNING", "RESTARTING", "PAUSED", "EXITED", "DEAD", "HIBERNATING"),
}  # fmt: skip
_GONE = {"gcp": ("DEPROVISIONING",), "lambda": ("terminating", "terminated"), "runpod": ("TERMINATED",)}
_CLOUDS = sorted(_THERE)

_REFUSALS = {
    "gcp": Answer(played_gcp.error(403, "forbidden", "Required 'compute.instances.list' permission"), 403),
    "lambda": Answer(played_lambda.REFUSED, 403),
    "runpod": Answer({"errors": [{"message": "Unauthorized"}], "data": None}),
}
# Answers with 200 in which nothing says what there is.
_EMPTY_WORDS = {
    "gcp": [
        Answer({"warning": {"code": "UNREACHABLE", "message": "the zone is unreachable"}}),
        Answer("<html>Please log in</html>"),
    ],
    "lambda": [Answer({}), Answer({"message": "maintenance"}), Answer("<html>Please log in</html>")],
    "runpod": [Answer({"data": {"myself": None}}), Answer({"data": None}), Answer("<html>Log in</html>")],
}


@pytest.mark.parametrize("cloud", _CLOUDS)
def test_g07_a_machine_in_any_state_but_gone_is_listed(played_sky: PlayedSky, cloud: str) -> None:
    cluster = played_sky.new_cluster()
    played = played_sky.played[cloud]
    machines = {played.add_machine(on_cloud(cluster), state): state for state in _THERE[cloud]}
    for state in _GONE[cloud]:
        played.add_machine(on_cloud(cluster), state)
    listed = played_sky.listed(cloud, cluster)
    assert [machines[one] for one in machines if one in listed] == list(machines.values())
    assert len(listed) == len(machines), "what is gone for good is none, though it is still shown"


@pytest.mark.parametrize("cloud", _CLOUDS)
def test_only_the_clusters_own_machines_are_listed(played_sky: PlayedSky, cloud: str) -> None:
    cluster = played_sky.new_cluster()
    played = played_sky.played[cloud]
    up = {"gcp": "RUNNING", "lambda": "active", "runpod": "RUNNING"}[cloud]
    for stranger in ("somebody", f"{on_cloud(cluster)}0", "slip-ffffffff-ffffffff"):
        played.add_machine(stranger, up)
    assert played_sky.listed(cloud, cluster) == []
    assert played_sky.proxy.refused == [], "nobody else was asked"


@pytest.mark.parametrize("cloud", _CLOUDS)
def test_g07_a_provider_that_refuses_its_list_is_no_word(played_sky: PlayedSky, cloud: str) -> None:
    cluster = played_sky.new_cluster()
    played_sky.played[cloud].fail(played_sky.played[cloud].listing, _REFUSALS[cloud])
    with pytest.raises(LaunchError):
        played_sky.listed(cloud, cluster)


@pytest.mark.parametrize(
    ("cloud", "number"), [(cloud, number) for cloud in _CLOUDS for number in range(len(_EMPTY_WORDS[cloud]))]
)
def test_g07_an_answer_without_a_list_is_no_empty_list(
    played_sky: PlayedSky, cloud: str, number: int
) -> None:
    cluster = played_sky.new_cluster()
    played_sky.played[cloud].fail(played_sky.played[cloud].listing, _EMPTY_WORDS[cloud][number])
    with pytest.raises(LaunchError):
        played_sky.listed(cloud, cluster)


def test_g07_an_empty_page_of_googles_list_is_not_its_end(played_sky: PlayedSky) -> None:
    cluster = played_sky.new_cluster()
    machine = played_sky.gcp.add_machine(on_cloud(cluster), "RUNNING")
    played_sky.gcp.empty_first_page = True
    assert played_sky.listed("gcp", cluster) == [machine]


def test_p04_google_and_runpod_say_whose_account_answers(played_sky: PlayedSky) -> None:
    """Google's lists are asked of the run's own project; another user's of RunPod are none of the run's."""
    cluster, sky = played_sky.new_cluster(), played_sky.sky
    said = {cloud: sky.call("account", ASK_SECONDS, cloud=cloud) for cloud in _CLOUDS}
    assert said["gcp"]["id"] == played_gcp.PROJECT and said["runpod"]["id"] == "user"
    assert said["lambda"] is None
    own = {"gcp": {"id": "own-project", "profile": None}, "runpod": {"id": "own", "profile": None}}
    asked = {"cluster": cluster, "gpus": "H100:1", "infra": ["gcp"], "accounts": own}
    for one in sky.call("candidates", ASK_SECONDS, **asked)["providers"]:
        assert one["config"]["project_id"] == "own-project"
    order = ClusterRequest(cluster, ["runpod"], "H100:1", accounts=own)
    asking = ProviderListings(order, lambda: ["runpod"]).ask(sky, played_sky.providers("runpod", cluster))
    with pytest.raises(OtherAccountError, match="RunPod"):
        asking.complete()
