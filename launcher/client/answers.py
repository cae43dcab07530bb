"""Reads the gateway's answers to our own routes: JSON, or the error they carry as an exception.

Neighbours: `connection.py` asks. Knows nothing of the requests.
"""

from __future__ import annotations

import json
from typing import Any

import httpx

from launcher.client.failures import Refused, Rewound
from launcher.client.request_bodies import CLIENT_STATE_MAX_BYTES


def parse_json(response: httpx.Response) -> Any:
    """The answer's JSON. Raises Refused if it is not JSON."""
    try:
        return response.json()
    except ValueError:
        raise Refused(
            "The endpoint's answer is not JSON",
            response.status_code,
            why=response.text[:300],
            hint="is LAUNCH_BASE_URL the address `launch` gave?",
        ) from None


def refused_error(method: str, path: str, response: httpx.Response) -> Refused:
    """The error the runtime answered with, as an exception."""
    try:
        error = dict(response.json()["error"])
    except (ValueError, KeyError, TypeError):
        error = {}
    kind = Rewound if error.get("code") == "rewound" else Refused
    return kind(
        f"{method} {path.partition('?')[0]} failed with HTTP {response.status_code}",
        response.status_code,
        error,
        why=str(error.get("message") or response.text[:300]),
        hint="LAUNCH_API_KEY is not this run's token" if response.status_code == 401 else None,
    )


def check_client_state(client_state: dict[str, Any]) -> None:
    """Raise ValueError for a client_state that no step carries."""
    size = len(json.dumps(client_state).encode())
    if size > CLIENT_STATE_MAX_BYTES:
        raise ValueError(
            f"client_state is {size} bytes of JSON; a step carries at most {CLIENT_STATE_MAX_BYTES}"
        )
