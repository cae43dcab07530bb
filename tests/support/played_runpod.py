"""RunPod's API, played: `https://api.runpod.io/graphql`, the queries and mutations SkyPilot sends.

GraphQL is not parsed: what is asked is known by the field's name. Bodies follow RunPod's GraphQL reference
and its Python SDK; nothing was recorded from an account.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, ClassVar

from tests.support.played_https import Answer, Asked, Played

NO_CAPACITY = "There are no longer any instances available with the requested specifications."
NOT_FOUND = "Something went wrong. Please try again later or contact support."
_DEPLOY = re.compile(r"podFindAndDeployOnDemand|podRentInterruptable")


@dataclass
class PlayedRunPod(Played):
    """`stock` is where there is capacity, by country; `pods` what there is, by id, as `myself` shows it."""

    hosts: ClassVar[tuple[str, ...]] = ("api.runpod.io", "rest.runpod.io")
    listing: ClassVar[str] = "myPods"
    ending: ClassVar[str] = "podTerminate"
    stock: set[str] = field(default_factory=lambda: {"US", "CA"})
    pods: dict[str, dict[str, Any]] = field(default_factory=dict)
    # What was sent to make each pod: its arguments, as text.
    deployed: list[dict[str, str]] = field(default_factory=list)

    def forget(self) -> None:
        """As new."""
        super().forget()
        self.stock = {"US", "CA"}
        self.pods.clear()
        self.deployed.clear()

    def add(self, name: str, status: str = "RUNNING") -> str:
        """A pod of this name."""
        found = f"pod{len(self.asked)}x{len(self.pods)}"
        ports = [
            {"ip": "127.0.0.3", "isIpPublic": True, "privatePort": 22, "publicPort": 10022, "type": "tcp"},
            {"ip": "10.0.0.3", "isIpPublic": False, "privatePort": 22, "publicPort": 22, "type": "tcp"},
        ]
        runtime = {"ports": ports} if status == "RUNNING" else None
        self.pods[found] = {
            "id": found, "name": name, "desiredStatus": status, "vcpuCount": 8, "runtime": runtime,
            "machine": {"gpuDisplayName": "H100 PCIe"},
        }  # fmt: skip
        return found

    def add_machine(self, cluster: str, state: str) -> str:
        return self.add(f"{cluster}-head", state)

    def machines(self) -> list[str]:
        return list(self.pods)

    def answer(self, asked: Asked) -> Answer:
        """See RunPod's GraphQL reference."""
        query = _query(asked)
        if _DEPLOY.search(query):
            return self._deploy(query)
        if "podTerminate" in query:
            return self._end(_arguments(query)["podId"])
        if "podTemplates" in query:
            return _data(myself={"podTemplates": []})
        if "gpuTypes" in query:
            gpu = {"id": "NVIDIA H100 PCIe", "displayName": "H100 PCIe", "memoryInGb": 80}
            return _data(gpuTypes=[gpu])
        if "myPods" in query:
            return _data(myself={"pods": list(self.pods.values())})
        if "myself" in query:
            return _data(myself={"id": "user", "pubKey": "", "networkVolumes": []})
        if "updateUserSettings" in query:
            return _data(updateUserSettings={"id": "user"})
        return _error(f"not played: {query}")

    def _deploy(self, query: str) -> Answer:
        wanted = _arguments(query)
        self.deployed.append(wanted)
        if wanted["countryCode"] not in self.stock:
            return _error(NO_CAPACITY)
        pod = {"id": self.add(wanted["name"]), "machineId": "m", "imageName": wanted["imageName"]}
        return _data(**{_DEPLOY.findall(query)[0]: pod})

    def _end(self, pod: str) -> Answer:
        if pod not in self.pods:
            return _error(NOT_FOUND)
        if self.ends_as is None:
            del self.pods[pod]
        else:
            self.pods[pod]["desiredStatus"] = self.ends_as
        return _data(podTerminate=None)


def _query(asked: Asked) -> str:
    return str(asked.body["query"]) if isinstance(asked.body, dict) else ""


def _arguments(query: str) -> dict[str, str]:
    """`name: "value"` and `name: 3` in a query."""
    quoted = re.findall(r'(\w+):\s*"((?:[^"\\]|\\.)*)"', query)
    return dict(quoted) | dict(re.findall(r"(\w+):\s*(\d+|true|false|ALL|SECURE|COMMUNITY)\b", query))


def _data(**fields: Any) -> Answer:
    return Answer({"data": fields})


def _error(message: str) -> Answer:
    return Answer({"errors": [{"message": message, "path": ["query"]}], "data": None})
