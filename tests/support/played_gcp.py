"""Google Cloud's APIs, played: Compute Engine, IAM and Resource Manager, as far as SkyPilot asks them.

Bodies, states and codes are those of Google's public API reference; nothing was recorded from an account.
`GCLOUD` stands in for the `gcloud` command, which SkyPilot asks who is logged in and what is enabled. It
keeps the keys of OS Login in a file beside itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from tests.support.played_https import Answer, Asked, Played

PROJECT = "played-project"
ZONES = ("us-central1-a", "us-central1-b")
ACCOUNT = f"skypilot-v1@{PROJECT}.iam.gserviceaccount.com"
GCLOUD = f"""\
#!/bin/sh
case "$*" in
*"auth list"*) echo somebody@example.com ;;
*"services list"*)
    echo compute.googleapis.com; echo cloudresourcemanager.googleapis.com
    echo iam.googleapis.com; echo storage.googleapis.com ;;
*"get-value project"*|*"config get project"*) echo {PROJECT} ;;
*"os-login describe-profile"*) printf 'posixAccounts:\\n- username: somebody_example_com\\n' ;;
*"os-login ssh-keys add --key-file="*)
    grep -qsF "$(cat "${{5#*=}}")" "$0.keys" || {{ cat "${{5#*=}}"; echo; }} >> "$0.keys" ;;
*"os-login ssh-keys list"*) [ -f "$0.keys" ] && cat "$0.keys" ;;
*"os-login ssh-keys remove --key-file="*) [ -f "$0.keys" ] || exit 1
    grep -vF "$(cat "${{5#*=}}")" "$0.keys" > "$0.left"; mv "$0.left" "$0.keys" ;;
*"firewall-rules create"*) ;;
*) echo "not played: gcloud $*" >&2; exit 1 ;;
esac
"""
# What google-auth finds at home. The token is asked for at the address that is played.
CREDENTIALS = {
    "type": "authorized_user", "client_id": "id", "client_secret": "played", "refresh_token": "played",
}  # fmt: skip
_ROLES = ("storage.admin", "compute.admin", "iam.serviceAccountUser", "iam.roleViewer")
_FIREWALLS = [
    {
        "direction": "INGRESS", "sourceRanges": ["10.128.0.0/9"],
        "allowed": [{"IPProtocol": "tcp", "ports": ["0-65535"]}, {"IPProtocol": "udp", "ports": ["0-65535"]}],
    },
    {
        "direction": "INGRESS", "sourceRanges": ["0.0.0.0/0"],
        "allowed": [{"IPProtocol": "tcp", "ports": ["22"]}],
    },
]  # fmt: skip


def error(code: int, reason: str, message: str) -> dict[str, Any]:
    """An error's body as Google's APIs word it."""
    details = [{"message": message, "domain": "global", "reason": reason}]
    return {"error": {"code": code, "message": message, "errors": details}}


@dataclass
class PlayedGcp(Played):
    """`stock` is where there is capacity, by zone; `instances` what there is, by zone and name."""

    hosts: ClassVar[tuple[str, ...]] = (
        "compute.googleapis.com", "iam.googleapis.com", "cloudresourcemanager.googleapis.com",
        "oauth2.googleapis.com",
    )  # fmt: skip
    listing: ClassVar[str] = r"GET \S+/instances "
    ending: ClassVar[str] = r"DELETE \S+/instances/"
    stock: set[str] = field(default_factory=lambda: set(ZONES))
    instances: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    # The bodies machines were asked for with.
    inserted: list[dict[str, Any]] = field(default_factory=list)
    # A list with a filter may begin with a page of nothing.
    empty_first_page: bool = False
    # Where there is no capacity the machine is made all the same, and then fails.
    makes_and_fails: bool = False
    # Whether the project has OS Login.
    os_login: bool = False

    def forget(self) -> None:
        """As new."""
        super().forget()
        self.stock = set(ZONES)
        self.empty_first_page = self.makes_and_fails = self.os_login = False
        self.instances.clear()
        self.inserted.clear()

    def add_machine(self, cluster: str, state: str, zone: str = ZONES[0]) -> str:
        name = f"{cluster}-head-{len(self.instances):08x}-compute"
        self._make(name, zone, {"ray-cluster-name": cluster}, state)
        return name

    def machines(self) -> list[str]:
        return [name for _, name in self.instances]

    def _make(self, name: str, zone: str, labels: dict[str, str], status: str = "RUNNING") -> None:
        access = {"natIP": "127.0.0.4", "name": "External NAT"}
        self.instances[zone, name] = {
            "id": str(len(self.instances)), "name": name, "status": status, "labels": labels,
            "machineType": f"projects/{PROJECT}/zones/{zone}/machineTypes/a3-highgpu-1g",
            "creationTimestamp": "2026-11-22T11:59:00.000-08:00",
            "labelFingerprint": "x", "zone": f"projects/{PROJECT}/zones/{zone}",
            "lastStartTimestamp": "2026-11-22T12:00:00.000-08:00",
            "networkInterfaces": [{"networkIP": "10.128.0.4", "accessConfigs": [access]}],
        }  # fmt: skip

    def answer(self, asked: Asked) -> Answer:
        """See Google's API reference."""
        for pattern, play in self._plays().items():
            if found := re.fullmatch(pattern, str(asked)):
                return play(asked, *found.groups())
        return Answer(error(404, "notFound", f"not played: {asked}"), 404)

    def _plays(self) -> dict[str, Callable[..., Answer]]:
        project, zone = f"/compute/v1/projects/{PROJECT}", r"zones/([\w-]+)"
        subnet = {"name": "default", "network": f"projects/{PROJECT}/global/networks/default"}
        subnet |= {"selfLink": f"projects/{PROJECT}/regions/us-central1/subnetworks/default"}
        bindings = [{"role": f"roles/{role}", "members": [f"serviceAccount:{ACCOUNT}"]} for role in _ROLES]
        metadata = [{"key": "enable-oslogin", "value": "TRUE"}] if self.os_login else []
        said: dict[str, Any] = {
            r"POST /token": {"access_token": "played", "expires_in": 3600, "token_type": "Bearer"},
            rf"GET /v1/projects/{PROJECT}": {"projectId": PROJECT, "lifecycleState": "ACTIVE"},
            rf"POST /v1/projects/{PROJECT}:getIamPolicy": {"bindings": bindings},
            r"GET /v1/projects/[\w-]+/serviceAccounts/.*": {"projectId": PROJECT, "email": ACCOUNT},
            rf"GET {project}": {"name": PROJECT, "commonInstanceMetadata": {"items": metadata}},
            rf"GET {project}/regions/[\w-]+/subnetworks": {"items": [subnet]},
            rf"GET {project}/global/networks/default/getEffectiveFirewalls": {"firewalls": _FIREWALLS},
            rf"GET {project}/global/firewalls": {},
            rf"GET {project}/{zone}/reservations": {},
        }
        fixed: dict[str, Callable[..., Answer]] = {
            pattern: lambda asked, *_, body=body: Answer(body) for pattern, body in said.items()
        }
        return fixed | {
            rf"POST /v1/projects/{PROJECT}:testIamPermissions": lambda asked: Answer(asked.body),
            rf"GET {project}/{zone}/instances": self._list,
            rf"GET {project}/aggregated/instances": self._list_all,
            rf"GET {project}/{zone}/instances/([\w-]+)": self._get,
            rf"POST {project}/{zone}/instances/bulkInsert": self._insert,
            rf"POST {project}/{zone}/instances/([\w-]+)/setLabels": self._label,
            rf"DELETE {project}/{zone}/instances/([\w-]+)": self._end,
            rf"POST {project}/{zone}/operations/([\w-]+)/wait": self._wait,
        }

    def _list(self, asked: Asked, zone: str) -> Answer:
        if self.empty_first_page and "pageToken" not in asked.query:
            none = {"code": "NO_RESULTS_ON_PAGE", "message": "There are no results for this page."}
            return Answer({"id": "list", "nextPageToken": "2", "warning": none})
        wanted = dict(re.findall(r"labels\.([\w-]+) = ([\w-]+)", asked.query.get("filter", "")))
        states = re.findall(r"status = (\w+)", asked.query.get("filter", ""))
        found = [
            one
            for (where, _), one in self.instances.items()
            if where == zone and wanted.items() <= one["labels"].items()
        ]
        found = [one for one in found if not states or one["status"] in states]
        return Answer({"items": found} if found else {"id": "list"})

    def _list_all(self, asked: Asked) -> Answer:
        """Of every zone; one without such machines says so in a warning."""
        (wanted,) = re.findall(r"labels\.([\w-]+):\*", asked.query["filter"])
        none = {"warning": {"code": "NO_RESULTS_ON_PAGE", "message": "There are no results for this scope."}}
        found: dict[str, Any] = {f"zones/{zone}": none for zone in ZONES}
        for zone in ZONES:
            there = [one for (where, _), one in self.instances.items() if where == zone]
            if labelled := [one for one in there if wanted in one["labels"]]:
                found[f"zones/{zone}"] = {"instances": labelled}
        return Answer({"items": found})

    def _get(self, asked: Asked, zone: str, name: str) -> Answer:
        found = self.instances.get((zone, name))
        return Answer(found) if found else _missing(zone, name)

    def _insert(self, asked: Asked, zone: str) -> Answer:
        self.inserted.append({"zone": zone, **asked.body})
        if zone in self.stock or self.makes_and_fails:
            for name in asked.body["perInstanceProperties"]:
                self._make(name, zone, dict(asked.body["instanceProperties"]["labels"]))
        return Answer({"name": "done" if zone in self.stock else "out-of-stock", "status": "RUNNING"})

    def _wait(self, asked: Asked, zone: str, name: str) -> Answer:
        if name != "out-of-stock":
            return Answer({"name": name, "status": "DONE"})
        message = f"The zone 'projects/{PROJECT}/zones/{zone}' does not have enough resources available."
        trouble = {"code": "ZONE_RESOURCE_POOL_EXHAUSTED", "message": message}
        return Answer({"name": name, "status": "DONE", "error": {"errors": [trouble]}})

    def _label(self, asked: Asked, zone: str, name: str) -> Answer:
        self.instances[zone, name]["labels"] = asked.body["labels"]
        return Answer({"name": "done", "status": "DONE"})

    def _end(self, asked: Asked, zone: str, name: str) -> Answer:
        if (zone, name) not in self.instances:
            return _missing(zone, name)
        if self.ends_as is None:
            del self.instances[zone, name]
        else:
            self.instances[zone, name]["status"] = self.ends_as
        return Answer({"name": "done", "status": "DONE"})


def _missing(zone: str, name: str) -> Answer:
    what = f"The resource 'projects/{PROJECT}/zones/{zone}/instances/{name}' was not found"
    return Answer(error(404, "notFound", what), 404)
