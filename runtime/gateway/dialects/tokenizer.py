"""vLLM's routes of the tokenizer: `POST /tokenize`, `POST /detokenize` and `GET /tokenizer_info`.

Neighbours: gateway.py mounts them; the engines have the tokenizer. Messages are tokenised as a chat request
with them would be, however long they are.
"""

from __future__ import annotations

from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from runtime.gateway.completions import request_parsing
from runtime.gateway.completions.proxy import engine_refusal
from runtime.gateway.dialects.chat_request import refuse
from runtime.gateway.dialects.endpoint import checked
from runtime.gateway.engines.engine_client import EngineClient, EngineError
from runtime.gateway.http.openai_errors import CONTEXT_LENGTH, ApiError
from runtime.gateway.requests.request_fields import Kind

Body = dict[str, Any]


class PromptReader(Protocol):
    """completions/proxy.py. All raise ApiError."""

    async def engine_of(self, model: str) -> EngineClient: ...
    async def render(self, chat: Body) -> list[int]: ...
    def checked(self, kind: Kind, body: Body) -> Body: ...


_OF_TEXT = frozenset({"model", "prompt", "add_special_tokens"})
_OF_MESSAGES = frozenset(
    {
        "model", "messages", "tools", "add_generation_prompt", "continue_final_message",
        "add_special_tokens", "chat_template_kwargs", "documents", "reasoning_effort",
    }
)  # fmt: skip
_OF_TEMPLATE = _OF_MESSAGES - {"documents", "reasoning_effort"}  # what the engine's own route takes
_OF_TOKENS = frozenset({"model", "tokens"})
_MAX_TOKEN = 2**31
# Others wait while an engine reads a text; these are several of the longest contexts.
_MAX_BYTES, _MAX_TOKENS = 2_000_000, 500_000


class TokenizerRoutes:
    """The routes. `model`: the one that is meant where a request names none."""

    def __init__(self, completions: PromptReader, model: str) -> None:
        self._completions = completions
        self._model = model

    def routes(self, prefix: str) -> list[Route]:
        """Them below the server's root, or below a rollout's."""
        return [
            Route(f"{prefix}/tokenize", self._tokenize, methods=["POST"]),
            Route(f"{prefix}/detokenize", self._detokenize, methods=["POST"]),
            Route(f"{prefix}/tokenizer_info", self._info, methods=["GET"]),
        ]

    async def _tokenize(self, request: Request) -> JSONResponse:
        body = await self._body(request)
        shown = {"return_token_strs": body.pop("return_token_strs", None) is True}
        if body.get("messages") is not None:
            if shown["return_token_strs"]:
                refuse("return_token_strs", "is served for a prompt, not for messages")
            return await self._of_messages(body)
        body.pop("messages", None)
        _check_fields(body, _OF_TEXT)
        if not isinstance(body.get("prompt"), str):
            refuse("prompt", "is a text")
        return await self._ask("/tokenize", body | shown)

    async def _of_messages(self, body: Body) -> JSONResponse:
        _check_fields(body, _OF_MESSAGES)
        engine = await self._completions.engine_of(body["model"])
        try:
            tokens = await self._completions.render(body)
        except ApiError as error:
            if error.code != CONTEXT_LENGTH:
                raise
            # No chat has these ids; how many they are is what one wants to know.
            kept = self._completions.checked("chat", body)
            return await self._ask("/tokenize", {one: kept[one] for one in kept if one in _OF_TEMPLATE})
        answer: Body = {"count": len(tokens), "tokens": tokens, "token_strs": None}
        return JSONResponse(answer | {"max_model_len": engine.facts.context_length})

    async def _detokenize(self, request: Request) -> JSONResponse:
        body = await self._body(request)
        _check_fields(body, _OF_TOKENS)
        tokens = body.get("tokens")
        known = isinstance(tokens, list) and all(type(one) is int and 0 <= one < _MAX_TOKEN for one in tokens)
        if not known:
            refuse("tokens", "is a list of token ids")
        return await self._ask("/detokenize", body)

    async def _info(self, request: Request) -> JSONResponse:
        return await self._ask("/tokenizer_info", None)

    async def _body(self, request: Request) -> Body:
        """Raises ApiError for one that is too large, before it is read through."""
        content = await request.body()
        body = request_parsing.decode_object(content)
        tokens = body.get("tokens")
        if isinstance(tokens, list) and len(tokens) > _MAX_TOKENS:
            refuse("tokens", f"has more than {_MAX_TOKENS:,}")
        if not isinstance(tokens, list) and len(content) > _MAX_BYTES:
            name = "prompt" if body.get("messages") is None else "messages"
            refuse(name, f"is longer than {_MAX_BYTES:,} bytes")
        checked(body)
        return body if body.get("model") is not None else body | {"model": self._model}

    async def _ask(self, path: str, body: Body | None) -> JSONResponse:
        engine = await self._completions.engine_of(self._model if body is None else body["model"])
        content = body and {name: value for name, value in body.items() if name != "model"}
        try:
            return JSONResponse(await engine.tokenizer(path, content))
        except EngineError as error:
            raise engine_refusal(error) from error


def _check_fields(body: Body, known: frozenset[str]) -> None:
    if not isinstance(body["model"], str):
        refuse("model", "is a text")
    for name in body:
        if name not in known and body[name] is not None:
            refuse(name[:80], "is not a field of this route")
