"""Regions that an account is denied: what SkyPilot's own code and AWS say there, and what a run concludes.

AWS is moto's server under a policy; SkyPilot is the real one, asked as a teardown asks it. No machine is
real.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.backends.skypilot import rental_check, sky_providers
from launcher.backends.skypilot.cluster_request import ClusterRequest
from launcher.backends.skypilot.provider_listings import ListingResult, ProviderListings
from launcher.backends.skypilot.sky_home import SkyHome
from launcher.backends.skypilot.sky_process import SkyProcess
from tests.support.played_aws import PlayedAws

pytestmark = pytest.mark.process

EAST, WEST = "us-east-1", "us-west-2"
ORDER = ClusterRequest("slip-0123abcd", ["aws"], "H100:4", disk_gb=200, labels={"slipway-home": "0a0b"})
ON_CLOUD = "slip-0123abcd-0123abcd"
_SECONDS = 300.0


@pytest.fixture(scope="module")
def aws() -> Iterator[PlayedAws]:
    played = PlayedAws()
    yield played
    played.close()


@pytest.fixture(scope="module")
def sky(aws: PlayedAws, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SkyProcess]:
    folder = tmp_path_factory.mktemp("denied")
    aws.furnish(folder / "user")
    home = SkyHome(folder / "sky", ["aws"], "0123abcd")
    home.make(folder / "user")
    sky = SkyProcess(home, folder / "skypilot.log")
    yield sky
    sky.end()


@pytest.fixture(autouse=True)
def _anew(aws: PlayedAws) -> None:
    aws.forget()


def said(sky: SkyProcess, *tried: str, certain: bool = False) -> tuple[ListingResult, ProviderListings]:
    """What a teardown learns of a cluster tried in these regions. `certain`: it was up in the last."""
    asked = {"cluster": ORDER.cluster, "gpus": ORDER.gpus, "infra": ORDER.infra}
    providers = sky.call("candidates", _SECONDS, **asked)["providers"]
    verdicts = ProviderListings(ORDER, lambda: [f"aws/{region}" for region in tried])
    up = next(one for one in providers if one["config"]["region"] == tried[-1]) if certain else None
    return verdicts.ask(sky, providers, up), verdicts


def found(said: ListingResult) -> dict[str, list[str]]:
    return {provider["config"]["region"]: machines for provider, machines in said.lists}


_PROVIDER = {"name": "AWS", "cluster_on_cloud": ON_CLOUD, "config": {"region": WEST}}


class _Refusing:
    """SkyPilot's process, where a region gives no list and refuses the run's request for a machine."""

    def __init__(self, list_error: Exception) -> None:
        self.list_error = list_error

    def call(self, name: str, seconds: float, **arguments: Any) -> dict[str, Any]:
        """One of its calls."""
        if name == "instances":
            return sky_providers.instances(arguments["providers"])
        return {"refused": "UnauthorizedOperation"}

    def verdict(self, order: ClusterRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
        """The places that had to answer and did not."""

        def fail(provider: Any) -> list[str]:
            raise self.list_error

        monkeypatch.setattr(sky_providers, "_listed", fail)
        double: Any = self
        return ProviderListings(order, lambda: [f"aws/{WEST}"]).ask(double, [_PROVIDER]).silent


def _aws_error(code: str) -> Exception:
    from botocore.exceptions import ClientError

    return ClientError({"Error": {"Code": code, "Message": "no"}}, "DescribeInstances")


def test_p04_a_list_that_failed_for_another_reason_than_a_policy_has_to_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from botocore.exceptions import EndpointConnectionError

    unreachable = EndpointConnectionError(endpoint_url="https://ec2.us-west-2.amazonaws.com/")
    for error in (unreachable, _aws_error("RequestExpired"), _aws_error("RequestLimitExceeded")):
        assert list(_Refusing(error).verdict(ORDER, monkeypatch)) == ["AWS us-west-2"]
    for code in ("UnauthorizedOperation", "AccessDenied"):
        assert _Refusing(_aws_error(code)).verdict(ORDER, monkeypatch) == {}


def test_p04_what_was_not_refused_when_it_was_asked_for_is_not_refused_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refusing = _Refusing(_aws_error("UnauthorizedOperation"))
    for place in ("aws", f"aws/{WEST}"):
        assert list(refusing.verdict(replace(ORDER, unsure=[place]), monkeypatch)) == ["AWS us-west-2"]
    assert refusing.verdict(replace(ORDER, unsure=[f"aws/{EAST}"]), monkeypatch) == {}


def test_p04_where_every_region_refuses_it_is_not_the_region(aws: PlayedAws, sky: SkyProcess) -> None:
    """A policy on the address or on a second factor: the VPN is down, or the shell has no such session."""
    refused = ("DescribeInstances", "RunInstances")
    aws.refuses = lambda region, action, query: action in refused
    heard, _ = said(sky, EAST, WEST)
    assert list(heard.silent) == ["AWS us-east-1", "AWS us-west-2"]
    assert ("ap-south-1", "DescribeInstances") in aws.asked, "the run was never there: any region would do"


def test_p04_a_refusal_without_the_users_own_network_proves_nothing(aws: PlayedAws, tmp_path: Path) -> None:
    """A policy may allow machines in that network alone, and the question names none."""
    aws.furnish(tmp_path / "user")
    (tmp_path / "user" / ".sky" / "config.yaml").write_text("aws:\n  vpc_names: [ours]\n")
    home = SkyHome(tmp_path / "sky", ["aws"], "0123abcd")
    home.make(tmp_path / "user")
    own = SkyProcess(home, tmp_path / "skypilot.log")
    aws.denied = {WEST}
    try:
        heard, _ = said(own, EAST, WEST)
    finally:
        own.end()
    assert list(heard.silent) == ["AWS us-west-2"]


def test_p04_a_denied_region_that_was_never_tried_counts_as_empty(aws: PlayedAws, sky: SkyProcess) -> None:
    machine = aws.rent(EAST, ON_CLOUD)
    aws.denied = {WEST}
    heard, verdicts = said(sky, EAST)
    assert heard.silent == {} and found(heard) == {EAST: [machine], WEST: []}
    assert verdicts.without_list == {"AWS us-west-2": "no machine was ever asked for there"}
    assert (WEST, "RunInstances") not in aws.asked


def test_p04_a_region_that_usually_answers_for_all_may_be_the_denied_one(
    aws: PlayedAws, sky: SkyProcess
) -> None:
    machine = aws.rent(WEST, ON_CLOUD)
    aws.denied = {EAST}
    heard, _ = said(sky, WEST)
    assert heard.silent == {} and found(heard)[WEST] == [machine]


def test_p04_a_tried_region_that_refuses_its_list_alone_has_to_answer(
    aws: PlayedAws, sky: SkyProcess
) -> None:
    aws.refuses = lambda region, action, query: region == WEST and action == "DescribeInstances"
    heard, _ = said(sky, EAST, WEST)
    assert (
        list(heard.silent) == ["AWS us-west-2"] and "UnauthorizedOperation" in heard.silent["AWS us-west-2"]
    )
    assert found(heard) == {EAST: []}


def test_p04_a_tried_region_that_refuses_the_runs_own_request_counts_as_empty(
    aws: PlayedAws, sky: SkyProcess
) -> None:
    aws.denied = {WEST}
    heard, verdicts = said(sky, EAST, WEST)
    assert heard.silent == {} and list(verdicts.without_list) == ["AWS us-west-2"]
    assert (WEST, "RunInstances") in aws.asked


@pytest.mark.parametrize("needs", ["tag", "type", "image", "without a volume's tags"])
def test_p04_a_policy_that_lets_only_the_runs_own_request_pass_proves_nothing(
    aws: PlayedAws, sky: SkyProcess, needs: str
) -> None:
    """A bare request, or one of another type, image or tag, is refused there; the run's own is not."""

    def allowed(query: dict[str, Any]) -> bool:
        told = " ".join(f"{name}={value}" for name, values in query.items() for value in values)
        return {
            "tag": "=slipway-home" in told and "=0a0b" in told and f"={ON_CLOUD}" in told,
            "type": "InstanceType=p5.24xlarge" in told,
            "image": "ImageId=ami-0slipwaytest0001" in told,
            "without a volume's tags": "=volume" not in told and "=0a0b" in told,
        }[needs]

    aws.refuses = lambda region, action, query: (
        region == WEST and not (action == "RunInstances" and allowed(query))
    )
    heard, _ = said(sky, EAST, WEST)
    assert list(heard.silent) == ["AWS us-west-2"], "there may be a machine"


def test_p14_an_account_that_may_rent_nowhere_is_told_so_and_one_that_may_somewhere_is_not(
    aws: PlayedAws, sky: SkyProcess, tmp_path: Path
) -> None:
    aws.refuses = lambda region, action, query: action == "RunInstances"
    assert rental_check.refusals(sky, "H100:4", ["aws"], tmp_path).keys() == {EAST, WEST}
    assert rental_check.refusals(sky, "H100:4", [f"aws/{WEST}"], tmp_path).keys() == {WEST}
    aws.refuses = lambda region, action, query: action == "RunInstances" and region == EAST
    assert rental_check.refusals(sky, "H100:4", ["aws"], tmp_path) == {}
    assert rental_check.refusals(sky, "L4:1", ["aws"], tmp_path) == {}, "nothing is offered"
    assert aws.running(EAST) == aws.running(WEST) == 0


def test_p04_where_the_machine_was_up_or_listed_a_refusal_is_never_emptiness(
    aws: PlayedAws, sky: SkyProcess
) -> None:
    aws.denied = {WEST}
    heard, _ = said(sky, EAST, WEST, certain=True)
    assert list(heard.silent) == ["AWS us-west-2"]

    aws.denied = set()
    machine = aws.rent(WEST, ON_CLOUD)
    before, verdicts = said(sky, EAST, WEST)
    assert found(before)[WEST] == [machine]
    aws.denied = {WEST}
    after = verdicts.ask(sky, [provider for provider, _ in before.lists])
    assert list(after.silent) == ["AWS us-west-2"]


def test_p04_a_teardown_names_the_region_that_does_not_answer_and_ends_what_the_others_list(
    aws: PlayedAws, sky: SkyProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it but SkyPilot's API server. Where the silent region was never tried it is proven."""
    from launcher.backends.skypilot import cluster_teardown

    monkeypatch.setattr(cluster_teardown, "_SETTLE_SECONDS", 0.0)
    aws.furnish(tmp_path / "user")
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    home = SkyHome(tmp_path / "sky", ["aws"], "0123abcd")
    home.make()
    own = SkyProcess(home, tmp_path / "skypilot.log")
    tried = ["aws/us-east-1", "aws/us-west-2"]
    ending = cluster_teardown.ClusterTeardown(ORDER, lambda: tried, home, own, lambda learned: None)
    aws.rent(EAST, ON_CLOUD)
    aws.refuses = lambda region, action, query: region == WEST and action == "DescribeInstances"
    with pytest.raises(Exception, match="AWS us-west-2"):
        ending._end_listed()
    proof = ending.proof(None)
    assert not proof.verified and "AWS us-west-2 did not list" in proof.detail
    assert "--region us-west-2" in proof.detail
    tried.remove("aws/us-west-2")
    proof = cluster_teardown.ClusterTeardown(ORDER, lambda: tried, home, own, lambda learned: None).proof(
        None
    )
    assert proof.verified, proof.detail
    assert "is listed by AWS us-east-1; AWS us-west-2 gives no list" in proof.detail
