"""The cloud account behind the current credentials: another account's empty list proves nothing.

Neighbours: `provision.py` asks before a provider is asked for a machine, `sky_providers.py` whenever a list
is empty; `sky_calls.py` answers with these in SkyPilot's process. Lambda has no name for an account.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Json = dict[str, Any]

# An answer takes a tenth of a second; an end must not wait for one that does not come.
_SECONDS = 4
_ATTEMPTS = 2
_REGION = "us-east-1"
# How boto3 calls credentials that no profile has.
_WITHOUT_PROFILE = ("env", "iam-role", "container-role", "assume-role-with-web-identity")


def account(cloud: str) -> Json | None:
    """Its "id", and the user's "profile" that leads to it, None if there is none. None if the account is
    unknown."""
    identity_call = _IDENTITY_CALLS.get(cloud)
    if identity_call is None:
        return None
    try:
        return identity_call()
    except Exception:  # noqa: BLE001 - after any error the account is unknown
        return None


def other_account(cloud: str, accounts: Json) -> Json | None:
    """The account that answers now, if it is not the run's own, by cloud in `accounts`; {"id": None} if the
    account is unknown. Google's lists are those of the run's own project, whichever account asks."""
    own = accounts.get(cloud)
    if own is None or cloud == "gcp":
        return None
    now = account(cloud) or {"id": None}
    return now if now["id"] != own["id"] else None


def _on_aws() -> Json:
    from sky.adaptors import aws

    session: Any = aws.session(profile=aws.get_workspace_profile())
    bounds = {"connect_timeout": _SECONDS, "read_timeout": _SECONDS, "total_max_attempts": _ATTEMPTS}
    client: Any = aws.client("sts", region_name=session.region_name or _REGION, **bounds)
    named = session.get_credentials().method not in _WITHOUT_PROFILE
    return {
        "id": client.get_caller_identity()["Account"],
        "profile": session.profile_name if named else None,
    }


def _on_gcp() -> Json:
    from sky.clouds import GCP

    return {"id": GCP.get_project_id(), "profile": None}


def _on_runpod() -> Json:
    from sky.adaptors import runpod

    kind: Any = runpod.runpod
    reply = kind.api.graphql.run_graphql_query("query { myself { id } }")
    return {"id": reply["data"]["myself"]["id"], "profile": None}


_IDENTITY_CALLS: dict[str, Callable[[], Json]] = {"aws": _on_aws, "gcp": _on_gcp, "runpod": _on_runpod}
