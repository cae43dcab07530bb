"""A judge behind any address that speaks OpenAI's chat completions, over plain HTTP.

Neighbours: `judge_protocol.py` reads its answers, `run_judge.py` is the judge that the run serves itself.
Knows nothing of the judged texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from launcher.client.ruler.judge_failures import AnswerUnusable, JudgeUnusable, RetryableError
from launcher.client.ruler.judge_protocol import (
    JudgeReply,
    Messages,
    cache_identity,
    error_for_status,
    headers_for,
    is_own_run,
    names_fixed_weights,
    parse_completion,
)
from launcher.client.ruler.judge_usage import Usage


@dataclass
class HttpJudge:
    """`base_url` as OpenAI's SDK takes it. The key is in no text of an error, and in no repr."""

    base_url: str
    api_key: str = field(repr=False)
    model: str
    # More of the request's body: temperature, max_tokens, …
    extra_params: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.base_url = self.base_url.rstrip("/")
        self.api_key = self.api_key.strip()  # out of a file it has the end of its line
        self._supports_schema = True

    @property
    def name(self) -> str:
        return self.model

    @property
    def identity(self) -> str | None:
        if is_own_run(self.base_url) and not names_fixed_weights(self.model):
            return None
        return cache_identity(self.base_url, self.model, self.extra_params)

    async def ask(self, messages: Messages, form: Mapping[str, Any], seconds: float) -> JudgeReply:
        """See Judge. Where the form itself is refused it is asked without, from then on."""
        response = await self._post(self._body(messages, form), seconds)
        if (
            response.status_code in (400, 422)
            and self._supports_schema
            and "response_format" in response.text
        ):
            self._supports_schema = False
            response = await self._post(self._body(messages, form), seconds)
        return parse_response(response, self.name, self.api_key)

    def _body(self, messages: Messages, form: Mapping[str, Any]) -> dict[str, Any]:
        return chat_body(self.model, messages, form if self._supports_schema else None) | dict(
            self.extra_params
        )

    async def _post(self, body: dict[str, Any], seconds: float) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.api_key}", **headers_for(self.base_url)}
        is_tls = self.base_url.startswith("https:")
        try:
            # A client for each question: event loops come and go, and a judge takes seconds.
            async with httpx.AsyncClient(timeout=seconds, verify=is_tls, trust_env=is_tls) as client:
                return await client.post(f"{self.base_url}/chat/completions", json=body, headers=headers)
        except (httpx.UnsupportedProtocol, httpx.LocalProtocolError, httpx.InvalidURL, UnicodeError) as error:
            # The error is on our side, and its text may repeat the key.
            raise JudgeUnusable(
                f"The judge {self.model} cannot be asked: no request can be made of its address and its key",
                type(error).__name__,
                "look at the judge's address, which begins with http:// or https://, and at its key",
            ) from None
        except httpx.TransportError as error:
            raise RetryableError(f"{type(error).__name__}: {error}".rstrip(": ")) from None
        except httpx.DecodingError:
            raise AnswerUnusable("it is no chat completion", Usage(1, cost=None)) from None


def chat_body(model: str, messages: Messages, response_format: Mapping[str, Any] | None) -> dict[str, Any]:
    """A request's body."""
    body: dict[str, Any] = {"model": model, "messages": list(messages)}
    return body if response_format is None else body | {"response_format": response_format}


def parse_response(response: httpx.Response, name: str, api_key: str = "") -> JudgeReply:
    """The reply, or the error that its status means."""
    if response.is_error:
        text = response.text.replace(api_key, "…") if api_key else response.text
        raise error_for_status(name, response.status_code, text, _retry_after(response))
    try:
        body = response.json()
    except (ValueError, RecursionError):
        raise AnswerUnusable("it is no chat completion", Usage(1, cost=None)) from None
    return parse_completion(body, None)


def _retry_after(response: httpx.Response) -> float | None:
    try:
        return max(0.0, float(response.headers["retry-after"]))
    except (KeyError, ValueError):
        return None
