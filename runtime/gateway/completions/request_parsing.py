"""Parses an HTTP request into the engine's request: tags, model, body. Refuses malformed ones.

Neighbours: proxy.py sends the result to an engine; request_fields.py knows vLLM's fields. The body is read
once, as plain JSON: the engine validates the rest, and its own refusal is passed on.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from runtime.gateway.completions import echo
from runtime.gateway.http.openai_errors import ApiError
from runtime.gateway.requests import distribution, tools
from runtime.gateway.requests.request_fields import Kind
from runtime.gateway.samples.journal import Tags
from runtime.shared.headers import CONTINUE_HEADER, OFF, REFUSE, UNTRAINABLE_HEADER
from runtime.shared.schema import (
    CALL_HEADER,
    PREDICTOR_HEADER,
    PURPOSE_HEADER,
    RECEIPT_FOLLOWS,
    RECEIPT_HEADER,
    REQUEST_HEADER,
    ROLLOUT_HEADER,
    SESSION_HEADER,
)

_NAME = re.compile(r"[\x21-\x7e][\x20-\x7e]{0,127}")

# An assistant's refusal is text like any other, under its own name.
_TEXT_PARTS = ("text", "refusal")
_COMPLETION_PATH = "/v1/completions"
ENGINE_PATHS: dict[Kind, str] = {
    "chat": "/v1/chat/completions", "completion": _COMPLETION_PATH, "tokens": _COMPLETION_PATH,
}  # fmt: skip
# Not sampling settings, and of any size.
_NOT_SAMPLING_SETTINGS = frozenset(
    {"messages", "prompt", "tools", "model", "stream", "stream_options", "user", "metadata"}
)


@dataclass(frozen=True)
class ParsedRequest:
    """One admitted request."""

    id: str
    # Whether a retry can ask for it again by its id.
    named: bool
    # Whether the client will report that the answer was received; if not, its connection tells it.
    receipt_follows: bool
    digest: str
    kind: Kind
    tags: Tags
    model: str
    # The client's body, and the extra fields that it requested for itself.
    body: dict[str, Any]
    streamed: bool
    wants_logprobs: bool
    wants_ids: bool
    # Fields that are not heeded because the request is a rollout's; the answer names them.
    ignored: tuple[str, ...] = ()
    # Whether it may be sent as the ids of the turn that it goes on from.
    allows_continuation: bool = True
    # Whether to refuse it if its samples cannot be trained.
    trainable_only: bool = False

    @property
    def copies(self) -> int:
        """How often the engine's one answer is given: greedy ones are all equal, and vLLM makes only one."""
        return self.body.get("n") or 1 if distribution.temperature(self.body) == 0 else 1

    @property
    def choices_of_a_prompt(self) -> int:
        """How many choices each prompt of a completion has."""
        return self.body.get("n") or 1

    @property
    def echoes_logprobs(self) -> bool:
        """Whether the answer begins with its prompt's logprobs, which the engine gives."""
        return echo.is_echoed(self.body) and (self.wants_logprobs or echo.samples_nothing(self.body))

    @property
    def one_call(self) -> bool:
        """Whether it gets only the first of an answer's calls; the engine is not asked for that."""
        return tools.ONE_CALL in self.ignored

    @property
    def settings(self) -> dict[str, Any]:
        """Every sampling setting of the request, for the record."""
        return {name: value for name, value in self.body.items() if name not in _NOT_SAMPLING_SETTINGS}

    def for_engine(
        self, model: str, check: Callable[[Kind, dict[str, Any]], dict[str, Any]]
    ) -> dict[str, Any]:
        """The body the engine gets: `model` there, and always token ids and logprobs."""
        body = check(self.kind, self.body) | {"model": model, "return_token_ids": True}
        if self.copies > 1:
            body["n"] = 1
        if self.kind == "chat":
            body["logprobs"] = True
            body["top_logprobs"] = self.body.get("top_logprobs") or 0
        else:
            body["logprobs"] = self.body.get("logprobs") or 0
            if not self.echoes_logprobs:  # its text is put before the answer without the engine
                body.pop("echo", None)
        return body


async def read_body(receive: Any) -> bytes:
    """The request's body, which bodies.py has made one message."""
    return (await receive()).get("body", b"")


def parse_request(
    kind: Kind, headers: Mapping[str, str], path_rollout: str | None, content: bytes
) -> ParsedRequest:
    """Check one request's form. Raises ApiError(400) naming the parameter."""
    body = decode_object(content)
    check_form(kind, body)
    tags = read_tags(headers, path_rollout)
    body, ignored = (body, ()) if tags.rollout is None else tools.without_tool_grammar(body)
    name = headers.get(REQUEST_HEADER)
    if name is not None and not _NAME.fullmatch(name):
        raise ApiError(400, f"{REQUEST_HEADER}: 1 to 128 printable characters", param=REQUEST_HEADER)
    digest = hashlib.blake2b(content, digest_size=12, person=kind[:8].encode())
    digest.update(repr(tags).encode())
    return ParsedRequest(
        id=name or uuid.uuid4().hex,
        named=name is not None,
        receipt_follows=name is not None and headers.get(RECEIPT_HEADER) == RECEIPT_FOLLOWS,
        digest=digest.hexdigest(),
        kind=kind,
        tags=tags,
        model=body["model"],
        body=body,
        streamed=body.get("stream") is True,
        # Completions ask by a number, and 0 is one; in JSON False == 0, so the type decides.
        wants_logprobs=body.get("logprobs") is True if kind == "chat" else _is_number(body.get("logprobs")),
        wants_ids=body.get("return_token_ids") is True,
        ignored=ignored,
        allows_continuation=headers.get(CONTINUE_HEADER) != OFF,
        trainable_only=headers.get(UNTRAINABLE_HEADER) == REFUSE,
    )


def read_tags(headers: Mapping[str, str], path_rollout: str | None) -> Tags:
    """Rollout, predictor, call and purpose, from the path or the headers. Raises ApiError(400)."""
    rollout = path_rollout if path_rollout is not None else headers.get(ROLLOUT_HEADER)
    if path_rollout is not None and path_rollout.lower() == SESSION_HEADER:
        rollout = headers.get(SESSION_HEADER, "")
        if not _NAME.fullmatch(rollout):
            message = "at this address X-Session-ID names the rollout: 1 to 128 printable characters"
            raise ApiError(400, message, param=SESSION_HEADER)
    predictor, call = headers.get(PREDICTOR_HEADER), headers.get(CALL_HEADER)
    purpose = headers.get(PURPOSE_HEADER, "train")
    for header, value in ((ROLLOUT_HEADER, rollout), (PREDICTOR_HEADER, predictor)):
        if value is not None and not _NAME.fullmatch(value):
            raise ApiError(400, f"{header}: 1 to 128 printable characters", param=header)
    if call is not None and not (call.isascii() and call.isdigit() and len(call) < 10):
        raise ApiError(400, f"{CALL_HEADER}: a whole number from 0", param=CALL_HEADER)
    if purpose != "train" and purpose != "eval":
        raise ApiError(400, f"{PURPOSE_HEADER}: train or eval", param=PURPOSE_HEADER)
    return Tags(rollout, predictor, None if call is None else int(call), purpose)


def decode_object(content: bytes) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"The body is not JSON: {error}") from error
    except RecursionError as error:
        raise ApiError(400, "The body is nested too deeply") from error
    if not isinstance(body, dict):
        raise ApiError(400, "The body is not a JSON object")
    return body


def check_form(kind: Kind, body: dict[str, Any]) -> None:
    """Raises ApiError(400) for a body that is no request of its kind, or has content that is no text."""
    if not isinstance(body.get("model"), str) or not body["model"]:
        raise ApiError(400, "you must provide a model parameter", param="model")
    if kind == "chat" and not (isinstance(body.get("messages"), list) and body["messages"]):
        raise ApiError(400, "'messages' must be a list of at least one message", param="messages")
    if kind == "chat":
        for place, message in enumerate(body["messages"]):
            _check_text(message, f"messages[{place}].content")
    if kind != "chat" and not isinstance(body.get("prompt"), str | list):
        raise ApiError(400, "'prompt' must be a string or a list", param="prompt")
    if not isinstance(body.get("stream", False), bool | None):
        raise ApiError(400, "'stream' must be true or false", param="stream")


def _check_text(message: Any, place: str) -> None:
    """Refuse a message with content that the engine would have to fetch or decode (G24)."""
    content = message.get("content") if isinstance(message, dict) else message
    if isinstance(content, list):
        for index, part in enumerate(content):
            kind = part.get("type") if isinstance(part, dict) else None
            if kind not in _TEXT_PARTS or part.get("uuid") is not None:  # by which vLLM looks for media
                raise not_text(f"{place}[{index}]", kind)
    elif not (content is None or isinstance(content, str)):
        raise not_text(place, None)


def not_text(place: str, kind: Any, param: str = "messages") -> ApiError:
    """400 for content that is no text; `kind`: the type that it says it is of."""
    what = f"of type {kind[:40]!r}" if isinstance(kind, str) else "neither text nor a list of text parts"
    message = f"{place} is {what}: the policy reads text only, so remove it or describe it in words"
    return ApiError(400, message, param=param, code="unsupported_content")


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
