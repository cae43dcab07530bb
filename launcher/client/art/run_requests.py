"""One request of ART's backend to the run, on a route that only such programs use.

Neighbours: `backend.py` names the policy by it, `sample_lookup.py` looks samples up. Knows neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic_core import to_json

from launcher.client.answers import parse_json, refused_error
from launcher.client.request_bodies import REQUEST_HEADER
from launcher.client.session import Session
from launcher.client.wire import new_request_id


def post(session: Session, path: str, body: Mapping[str, Any]) -> Any:
    """The answer to a POST. Raises Refused."""
    headers = {REQUEST_HEADER: new_request_id(), "content-type": "application/json"}
    answer = session.connection.wire.send("POST", path, to_json(body, serialize_unknown=True), headers)
    if answer.is_error:
        raise refused_error("POST", path, answer)
    return parse_json(answer)
