"""The run's own model as a judge: `base`, the weights before training, unless another is named.

Its requests are evaluations, which can never be trained (X17). Neighbours: `launcher/client/wire.py` carries
the requests, and waits for a runtime that is away. Knows nothing of the judged texts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from launcher.client.connection import Connection
from launcher.client.request_bodies import PURPOSE_HEADER
from launcher.client.ruler.http_judge import chat_body, parse_response
from launcher.client.ruler.judge_protocol import JudgeReply, Messages, cache_identity, names_fixed_weights
from launcher.client.wire import AsyncWire


@dataclass
class RunJudge:
    """Raises EndpointLost as well, if the run is gone."""

    connection: Connection
    model: str = "base"
    extra_params: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._wire = AsyncWire(self.connection.endpoint, self.connection.patience)

    @property
    def name(self) -> str:
        return self.model

    @property
    def identity(self) -> str | None:
        if not names_fixed_weights(self.model):
            return None
        return cache_identity(self.connection.run_id, self.model, self.extra_params)

    async def ask(self, messages: Messages, form: Mapping[str, Any], seconds: float) -> JudgeReply:
        """See Judge."""
        content = json.dumps(chat_body(self.model, messages, form) | dict(self.extra_params)).encode()
        headers = {"content-type": "application/json", PURPOSE_HEADER: "eval"}
        response = await self._wire.send("POST", "/v1/chat/completions", content, headers)
        return parse_response(response, self.name, self.connection.api_key)
