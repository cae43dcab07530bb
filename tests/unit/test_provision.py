"""provision.py: one cloud after the other; what clouds but the test one say is played."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from launcher.backends.cloud_machine import CloudMachine
from launcher.backends.skypilot.cluster_request import ClusterRequest
from launcher.backends.skypilot.provision import Provisioning
from launcher.backends.skypilot.sky_home import SkyHome
from launcher.backends.skypilot.sky_process import NoAccessError, SkyCallError, SkyProcess
from launcher.base.errors import CapacityError, LaunchError

OFFER = {"instance_type": "p5.48xlarge", "price_per_hour": 27.52}
ORDER = ClusterRequest(
    "slip-0123abcd", ["lambda", "aws/us-east-1", "aws/us-west-2"], "H100:4", None, 10, None, {}
)


class Played:
    """Home and SkyPilot in one: what was done, in order; what each cloud answers."""

    def __init__(self, answers: dict[str, Exception]) -> None:
        self.did: list[str] = []
        self._answers = answers
        self._cloud: str | None = None
        # The regions in which the account may not have the order's machine.
        self.denied: list[str] = []
        # Whose credentials each cloud is asked with.
        self.account: dict[str, str] | None = None

    def remove(self) -> None:
        self.did.append("removed")

    def make(self, only: str | None = None, boot_commands: Sequence[str] = ()) -> list[str]:
        self.did.append(f"made for {only or 'all'}")
        self._cloud = only
        return []

    def serve(self) -> None:
        """Nothing to serve."""

    def end(self) -> None:
        """Nothing to end."""

    def call(self, name: str, seconds: float, *progress: object, **arguments: Any) -> Any:
        if name == "offers":
            return {"offers": [{"infra": place} | OFFER for place in arguments["infra"]]}
        if name == "rent_refused":
            return {"refused": "not authorized" if arguments["region"] in self.denied else None}
        if name == "account":
            self.did += [f"whose {arguments['cloud']}"] if self.account is not None else []
            return self.account
        if name != "launch":
            return {}
        self.did.append(f"asked {' and '.join(arguments['infra'])}")
        for one in (self._cloud, arguments["infra"][0]):
            if one in self._answers:
                raise self._answers[one]
        return {"where": self._cloud}


def provisioned(
    played: Played,
    tried: list[list[str]],
    unsure: list[str] | None = None,
    warned: list[str] | None = None,
) -> dict[str, Any]:
    """`tried`: all that was asked so far, each time that it was said. `unsure`: where it may be, of these.
    `warned`: gets the lines for the user."""
    order = replace(ORDER, unsure=[] if unsure is None else unsure)
    home, sky = cast("SkyHome", played), cast("SkyProcess", played)

    def trying(places: list[str]) -> None:
        tried.append(list(places))

    warn = ([] if warned is None else warned).append
    return Provisioning(order, home, sky, trying, warn, lambda line: None).run()


def test_g16_the_next_cloud_is_tried_in_a_home_of_its_own() -> None:
    played, tried = Played({"lambda": CapacityError("full")}), []
    assert provisioned(played, tried) == {"where": "aws"}
    assert played.did == [
        "removed", "made for lambda", "asked lambda",
        "removed", "made for aws", "asked aws/us-east-1", "made for all",
    ]  # fmt: skip
    assert tried == [["lambda"], ["lambda", "aws/us-east-1"]]


def test_p04_each_region_of_aws_is_written_down_before_it_is_asked() -> None:
    full = CapacityError("full")
    played, tried = Played({"lambda": full, "aws/us-east-1": full}), []
    assert provisioned(played, tried) == {"where": "aws"}
    assert played.did[-3:] == ["asked aws/us-east-1", "asked aws/us-west-2", "made for all"]
    assert tried[-1] == ["lambda", "aws/us-east-1", "aws/us-west-2"] and len(tried) == 3


def test_p04_a_region_that_the_account_is_denied_does_not_end_the_search() -> None:
    trouble = SkyCallError("launch", ["ValueError"], "Image 'ami-1' not found", Path("skypilot.log"))
    played, tried = Played({"lambda": CapacityError("full"), "aws/us-east-1": trouble}), []
    played.denied = ["us-east-1"]
    unsure: list[str] = []
    assert provisioned(played, tried, unsure) == {"where": "aws"}
    assert unsure == ["lambda", "aws/us-west-2"], "a region that refused it is none that may have it"
    assert played.did[-4:] == ["removed", "made for aws", "asked aws/us-west-2", "made for all"]
    played = Played({"lambda": CapacityError("full"), "aws/us-east-1": trouble})
    unsure = []
    with pytest.raises(SkyCallError):
        provisioned(played, [], unsure)
    assert unsure == ["lambda", "aws/us-east-1"]


def test_nowhere_is_said_by_the_last_cloud_and_all_of_them_can_be_asked_afterwards() -> None:
    played = Played({"lambda": CapacityError("full"), "aws": CapacityError("full as well")})
    with pytest.raises(CapacityError, match="as well"):
        provisioned(played, [])
    assert played.did[-1] == "made for all"


REFUSED = NoAccessError("the cloud does not accept your credentials", "Cloud access is not set up")


@pytest.mark.parametrize(("first", "tried_there"), [(CapacityError("full"), ["lambda"]), (REFUSED, [])])
def test_where_the_last_cloud_lets_nobody_in_only_the_others_were_asked(
    first: LaunchError, tried_there: list[str]
) -> None:
    played, tried = Played({"lambda": first, "aws": REFUSED}), []
    with pytest.raises(NoAccessError):
        provisioned(played, tried)
    assert tried[-1] == tried_there


def test_p11_a_cloud_that_refuses_the_credentials_is_said_and_the_next_is_tried() -> None:
    played, tried, warned = Played({"lambda": REFUSED}), [], []
    assert provisioned(played, tried, warned=warned) == {"where": "aws"}
    assert tried[-1] == ["aws/us-east-1"], "no machine can be at the first"
    assert warned == [f"lambda: {REFUSED.message} (Cloud access is not set up); aws is next"]


def test_p04_whose_account_it_is_is_written_down_before_a_machine_is_asked_for(tmp_path: Path) -> None:
    """From there on whoever lists its machines knows whose list is a proof."""
    played = Played({"lambda": CapacityError("full")})
    played.account = {"id": "111111111111", "profile": "a"}
    machine = CloudMachine(
        "slip-0123abcd", tmp_path, infra=ORDER.infra, gpus="H100:4", idle_minutes=10,
        keep=lambda description: kept.append(json.loads(json.dumps(description))),
    )  # fmt: skip
    kept: list[dict[str, Any]] = []
    home, sky = cast("SkyHome", played), cast("SkyProcess", played)
    Provisioning(machine._order, home, sky, machine._trying, lambda line: None, lambda line: None).run()
    assert played.did.index("whose aws") < played.did.index("asked aws/us-east-1")
    assert kept[0]["accounts"] == {"lambda": played.account}
    assert kept[1]["accounts"] == {"lambda": played.account, "aws": played.account}
    assert CloudMachine.from_description(kept[1])._order.accounts == kept[1]["accounts"]
    del kept[1]["accounts"]  # an older version's
    assert CloudMachine.from_description(kept[1])._order.accounts == {}
