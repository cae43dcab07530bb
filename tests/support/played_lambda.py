"""Lambda's API, played: `https://cloud.lambdalabs.com/api/v1` as its documents have it.

Bodies, codes and states are those of Lambda's public API reference; nothing was recorded from an account.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from tests.support.played_https import Answer, Asked, Played

REGIONS = ("us-east-1", "us-west-1")
TYPE = "gpu_1x_h100"
NO_CAPACITY = {
    "error": {
        "code": "instance-operations/launch/insufficient-capacity",
        "message": "Not enough capacity to fulfill launch request.",
        "suggestion": "Choose an instance type with more availability, or try again later.",
    }
}
REFUSED = {"error": {"code": "global/invalid-api-key", "message": "API key was invalid.", "suggestion": ""}}
NOT_FOUND = {
    "error": {"code": "global/object-does-not-exist", "message": "Specified instance does not exist."}
}
_PREFIX = "/api/v1"


@dataclass
class PlayedLambda(Played):
    """`stock` is where there is capacity; `instances` what there is, by id, as `GET /instances` shows it."""

    hosts: ClassVar[tuple[str, ...]] = ("cloud.lambdalabs.com",)
    listing: ClassVar[str] = r"GET \S+/instances "
    ending: ClassVar[str] = r"POST \S+/terminate .*\[\""
    stock: set[str] = field(default_factory=lambda: set(REGIONS))
    instances: dict[str, dict[str, Any]] = field(default_factory=dict)
    keys: list[dict[str, str]] = field(default_factory=list)

    def forget(self) -> None:
        """As new."""
        super().forget()
        self.stock = set(REGIONS)
        self.instances.clear()
        self.keys.clear()

    def add(self, name: str, status: str = "active", region: str = REGIONS[0]) -> str:
        """An instance of this name."""
        found = f"{len(self.asked):04x}{len(self.instances):028x}"
        self.instances[found] = {
            "id": found, "name": name, "ip": "127.0.0.2", "status": status, "ssh_key_names": ["key"],
            "region": {"name": region}, "instance_type": {"name": TYPE}, "hostname": "127.0.0.2",
        }  # fmt: skip
        return found

    def add_machine(self, cluster: str, state: str) -> str:
        return self.add(f"{cluster}-head", state)

    def machines(self) -> list[str]:
        return list(self.instances)

    def answer(self, asked: Asked) -> Answer:
        """See Lambda's API reference."""
        what = f"{asked.method} {asked.path.removeprefix(_PREFIX)}"
        if what == "GET /instances":
            return Answer({"data": list(self.instances.values())})
        if what == "GET /instance-types":
            stock = [{"name": region, "description": ""} for region in REGIONS if region in self.stock]
            return Answer({"data": {TYPE: {"regions_with_capacity_available": stock}}})
        if what == "GET /ssh-keys":
            return Answer({"data": self.keys})
        if what == "POST /ssh-keys":
            self.keys.append(asked.body)
            return Answer({"data": asked.body})
        if what == "POST /instance-operations/launch":
            if asked.body["region_name"] not in self.stock:
                return Answer(NO_CAPACITY, 400)
            made = self.add(asked.body["name"], region=asked.body["region_name"])
            return Answer({"data": {"instance_ids": [made]}})
        if what == "POST /instance-operations/terminate":
            return self._end(asked.body["instance_ids"])
        return Answer({"error": {"code": "global/not-found", "message": what}}, 404)

    def _end(self, wanted: list[str]) -> Answer:
        # SkyPilot also asks for none, after a launch that made none: what Lambda says then is not documented.
        if not set(wanted) <= set(self.instances):
            return Answer(NOT_FOUND, 404)
        ended = [self.instances[one] for one in wanted]
        for one in ended:
            if self.ends_as is None:
                del self.instances[one["id"]]
            else:
                one["status"] = self.ends_as
        return Answer({"data": {"terminated_instances": ended}})
