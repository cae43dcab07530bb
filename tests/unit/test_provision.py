"""provision.py: one cloud after the other; what clouds but the test one say is played."""

from __future__ import annotations

from typing import Any, cast

import pytest

from launcher.base.errors import CapacityError
from launcher.machines.skypilot.provision import Order, Provisioning
from launcher.machines.skypilot.sky_home import SkyHome
from launcher.machines.skypilot.sky_process import NoAccessError, SkyProcess

ORDER = Order("slip-0123abcd", ["lambda", "aws/us-east-1", "aws/us-west-2"], "H100:4", None, 10, None, {})


class Played:
    """Home and SkyPilot in one: what was done, in order; what each cloud answers."""

    def __init__(self, answers: dict[str, Exception]) -> None:
        self.did: list[str] = []
        self._answers = answers
        self._cloud: str | None = None

    def remove(self) -> None:
        self.did.append("removed")

    def make(self, only: str | None = None) -> list[str]:
        self.did.append(f"made for {only or 'all'}")
        self._cloud = only
        return []

    def serve(self) -> None:
        """Nothing to serve."""

    def end(self) -> None:
        """Nothing to end."""

    def call(self, name: str, seconds: float, *progress: object, **arguments: Any) -> Any:
        if name != "launch":
            return {}
        self.did.append(f"asked {' and '.join(arguments['infra'])}")
        if self._cloud in self._answers:
            raise self._answers[self._cloud]
        return {"where": self._cloud}


def provisioned(played: Played, asked: list[bool]) -> dict[str, Any]:
    home, sky = cast("SkyHome", played), cast("SkyProcess", played)
    return Provisioning(ORDER, home, sky, asked.append, lambda line: None, lambda line: None).run()


def test_g16_the_next_cloud_is_tried_in_a_home_of_its_own() -> None:
    played, asked = Played({"lambda": CapacityError("full")}), []
    assert provisioned(played, asked) == {"where": "aws"}
    assert played.did == [
        "removed", "made for lambda", "asked lambda",
        "removed", "made for aws", "asked aws/us-east-1 and aws/us-west-2", "made for all",
    ]  # fmt: skip
    assert asked == [True, True]


def test_nowhere_is_said_by_the_last_cloud_and_all_of_them_can_be_asked_afterwards() -> None:
    played = Played({"lambda": CapacityError("full"), "aws": CapacityError("full as well")})
    with pytest.raises(CapacityError, match="as well"):
        provisioned(played, [])
    assert played.did[-1] == "made for all"


@pytest.mark.parametrize(("cloud", "asked_somebody"), [("lambda", False), ("aws", True)])
def test_where_the_first_cloud_lets_nobody_in_nothing_was_asked(cloud: str, asked_somebody: bool) -> None:
    refused = NoAccessError("the cloud does not accept your credentials")
    played, asked = Played({"lambda": CapacityError("full")} | {cloud: refused}), []
    with pytest.raises(NoAccessError):
        provisioned(played, asked)
    assert asked[-1] is asked_somebody
