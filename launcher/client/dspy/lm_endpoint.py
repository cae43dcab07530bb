"""Tells whether a plain LM uses this run, by its address or by the name of its model, or another server.

Neighbours: `programs.py` trains LMs of this run, `external_failures.py` counts failures of others.
`--openai-env` sets the run's address for all clients of OpenAI's, also those that were meant for OpenAI. By
that variable alone, a model that the run does not have never counts as the run's (X10). Knows nothing of
programs.
"""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import quote, urlsplit

import dspy

from launcher.client.connection import Connection

_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
_PROVIDER, _ARBOR = "openai/", "arbor:"
_NOT_FOUND = 404
SET_API_BASE_HINT = (
    "OPENAI_BASE_URL names this run, which has no such model: give that LM "
    'api_base="https://api.openai.com/v1" and its own api_key'
)


def targets_run(lm: dspy.LM, connection: Connection) -> bool:
    """Whether a plain LM uses this run: by an address of its own, else by a name that the run has.

    Raises ValueError for an LM of Arbor's server here with a model that the run does not have.
    """
    base = _explicit_base_url(lm)
    if base:
        return _is_same_endpoint(base, connection.base_url)
    if not _uses_environment_url(lm, connection.base_url):
        return False
    why_not = _unknown_model_error(lm.model.removeprefix(_PROVIDER), connection)
    if why_not is not None and lm.model.removeprefix(_PROVIDER).startswith(_ARBOR):
        raise ValueError(f"the program's LM asks for {lm.model!r}: {why_not}")
    return why_not is None


def targets_run_by_environment(lm: Any, address: str | None = None) -> bool:
    """Whether its requests come to this run by the environment alone, and not by a name of the policy's.

    `address`: the run's; None: the address of the run this program was started in.
    """
    address = address or os.environ.get("LAUNCH_BASE_URL")
    return (
        type(lm) is dspy.LM
        and bool(address)
        and not _explicit_base_url(lm)
        and _uses_environment_url(lm, str(address))
    )


def _explicit_base_url(lm: dspy.LM) -> str | None:
    return lm.kwargs.get("api_base") or lm.kwargs.get("base_url")


def _uses_environment_url(lm: dspy.LM, address: str) -> bool:
    if not lm.model.startswith(_PROVIDER):
        return False
    base = os.environ.get("OPENAI_API_BASE") or os.environ.get("OPENAI_BASE_URL")
    return bool(base) and _is_same_endpoint(str(base), address)


def _is_same_endpoint(base: str, address: str) -> bool:
    here, there = urlsplit(address), urlsplit(str(base))
    same_host = here.hostname == there.hostname or {here.hostname, there.hostname} <= _LOOPBACK
    return same_host and here.port == there.port


def _unknown_model_error(model: str, connection: Connection) -> str | None:
    """None for a model that the run answers to, else the run's error message."""
    response = connection.wire.send("GET", f"/v1/models/{quote(model, safe='/:@+')}")
    if response.status_code != _NOT_FOUND:
        return None
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return "the run does not have it"
