"""Regions that an account is denied: what SkyPilot's own code and AWS say there, and what a run concludes.

AWS is moto's server under a policy; SkyPilot is the real one, asked as a teardown asks it. No machine is
real.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.machines.skypilot.order import Order
from launcher.machines.skypilot.sky_home import SkyHome
from launcher.machines.skypilot.sky_process import SkyProcess
from launcher.machines.skypilot.verdicts import Said, Verdicts
from tests.support.played_aws import PlayedAws

pytestmark = pytest.mark.process

EAST, WEST = "us-east-1", "us-west-2"
ORDER = Order("slip-0123abcd", ["aws"], "H100:4", disk_gb=200, labels={"slipway-home": "0a0b"})
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


def said(sky: SkyProcess, *tried: str, certain: bool = False) -> tuple[Said, Verdicts]:
    """What a teardown learns of a cluster tried in these regions. `certain`: it was up in the last."""
    asked = {"cluster": ORDER.cluster, "gpus": ORDER.gpus, "infra": ORDER.infra}
    providers = sky.call("candidates", _SECONDS, **asked)["providers"]
    verdicts = Verdicts(ORDER, lambda: [f"aws/{region}" for region in tried])
    up = next(one for one in providers if one["config"]["region"] == tried[-1]) if certain else None
    return verdicts.ask(sky, providers, up), verdicts


def found(said: Said) -> dict[str, list[str]]:
    return {provider["config"]["region"]: machines for provider, machines in said.lists}


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
    from launcher.machines.skypilot import teardown

    monkeypatch.setattr(teardown, "_SETTLE_SECONDS", 0.0)
    aws.furnish(tmp_path / "user")
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    home = SkyHome(tmp_path / "sky", ["aws"], "0123abcd")
    home.make()
    own = SkyProcess(home, tmp_path / "skypilot.log")
    tried = ["aws/us-east-1", "aws/us-west-2"]
    ending = teardown.Teardown(ORDER, lambda: tried, home, own, lambda learned: None)
    aws.rent(EAST, ON_CLOUD)
    aws.refuses = lambda region, action, query: region == WEST and action == "DescribeInstances"
    with pytest.raises(Exception, match="AWS us-west-2"):
        ending._end_listed()
    proof = ending.proof(None)
    assert not proof.verified and "AWS us-west-2 did not list" in proof.detail
    assert "--region us-west-2" in proof.detail
    tried.remove("aws/us-west-2")
    proof = teardown.Teardown(ORDER, lambda: tried, home, own, lambda learned: None).proof(None)
    assert proof.verified, proof.detail
    assert "is listed by AWS us-east-1; AWS us-west-2 gives no list" in proof.detail
