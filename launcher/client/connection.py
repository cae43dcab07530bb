"""A program's connection to its run: its address and key, JSON requests on our routes, and the run's
identity.

Neighbours: `wire.py` sends and retries, `answers.py` reads the answers, `schema.py` has the bodies;
`steps.py`, `tracing/` and `session.py` stand on it, as do DSPy's engine and the judges. Knows nothing of
rollouts, training steps or trajectories.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel

from launcher.client.answers import parse_json, refused_error
from launcher.client.request_bodies import REQUEST_HEADER
from launcher.client.schema import RuntimeStatus
from launcher.client.wire import Endpoint, Patience, Wire, new_request_id

_Answer = TypeVar("_Answer", bound=BaseModel)


@dataclass(eq=False)
class Connection:
    """Safe to use from several threads. Its requests raise EndpointLost, Refused and Rewound."""

    endpoint: Endpoint
    patience: Patience = field(default_factory=Patience.of_run)
    # For requests whose answers other code reads, refusals too.
    wire: Wire = field(init=False, repr=False)
    _served_name: str | None = field(default=None, init=False, repr=False)
    _run_id: str | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self.wire = Wire(self.endpoint, self.patience)

    # ------------------------------------------------------------- address

    @property
    def api_key(self) -> str:
        return self.endpoint.api_key

    @property
    def base_url(self) -> str:
        """The OpenAI-compatible base URL."""
        return f"{self.endpoint.root}/v1"

    def rollout_url(self, rollout: str) -> str:
        """The base URL that tags everything sent through it with this rollout."""
        return f"{self.endpoint.root}/rollouts/{quote(rollout, safe='')}/v1"

    # ------------------------------------------------------------- requests

    def get(self, path: str, answer: type[_Answer]) -> _Answer:
        return answer.model_validate(self.get_json(path))

    def get_json(self, path: str) -> Any:
        return parse_json(self.request("GET", path))

    def request(self, method: str, path: str, content: bytes | None = None) -> httpx.Response:
        """The answer. Raises the error that it carries."""
        headers = {REQUEST_HEADER: new_request_id()}
        if content is not None:
            headers["content-type"] = "application/json"
        response = self.wire.send(method, path, content, headers)
        if response.is_error:
            raise refused_error(method, path, response)
        return response

    # ------------------------------------------------------------- identity

    def status(self) -> RuntimeStatus:
        """The whole state of the run now."""
        status = self.get("/slipway/status", RuntimeStatus)
        self._served_name, self._run_id = status.served_name, status.run_id
        return status

    @property
    def model(self) -> str:
        """The policy's name on the endpoint; it always means the newest published version."""
        return self._served_name or self.status().served_name

    @property
    def run_id(self) -> str:
        """The run's id; it distinguishes the run's versions from another run's."""
        return self._run_id or self.status().run_id

    @property
    def version(self) -> int:
        """The policy version served now."""
        return self.status().version
