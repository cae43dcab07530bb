"""vLLM's routes of the tokenizer: `POST /tokenize`, `POST /detokenize` and `GET /tokenizer_info`.

Neighbours: gateway.py mounts them; the engines have the tokenizer. Messages are tokenised as a chat request
with them would be.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from runtime.gateway.completions import request_parsing
from runtime.gateway.completions.proxy import engine_refusal
from runtime.gateway.dialects.chat_request import refuse
from runtime.gateway.dialects.endpoint import checked
from runtime.gateway.engines.engine_client import EngineClient, EngineError

Body = dict[str, Any]
# A chat request's prompt, in token ids. Raises ApiError.
RenderPrompt = Callable[[Body], Awaitable[list[int]]]
# An engine that serves a model, by its name. Raises ApiError.
EngineOf = Callable[[str], Awaitable[EngineClient]]

_OF_TEXT = frozenset({"model", "prompt", "add_special_tokens", "return_token_strs"})
_OF_MESSAGES = frozenset(
    {
        "model", "messages", "tools", "add_generation_prompt", "continue_final_message",
        "add_special_tokens", "chat_template_kwargs", "documents", "reasoning_effort",
    }
)  # fmt: skip
_OF_TOKENS = frozenset({"model", "tokens"})
_MAX_TOKEN = 2**31


class TokenizerRoutes:
    """The routes. `model`: the one that is meant where a request names none."""

    def __init__(self, engine_of: EngineOf, render: RenderPrompt, model: str) -> None:
        self._engine_of = engine_of
        self._render = render
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
        if "messages" not in body:
            _check_fields(body, _OF_TEXT)
            if not isinstance(body.get("prompt"), str):
                refuse("prompt", "is a text")
            return JSONResponse(await self._ask("prompt", "/tokenize", body))
        _check_fields(body, _OF_MESSAGES)
        engine = await self._engine_of(body["model"])
        tokens = await self._render(body)
        answer: Body = {
            "count": len(tokens),
            "max_model_len": engine.facts.context_length,
            "tokens": tokens,
            "token_strs": None,
        }
        return JSONResponse(answer)

    async def _detokenize(self, request: Request) -> JSONResponse:
        body = await self._body(request)
        _check_fields(body, _OF_TOKENS)
        tokens = body.get("tokens")
        if not isinstance(tokens, list) or not all(
            type(one) is int and 0 <= one < _MAX_TOKEN for one in tokens
        ):
            refuse("tokens", "is a list of token ids")
        return JSONResponse(await self._ask("tokens", "/detokenize", body))

    async def _info(self, request: Request) -> JSONResponse:
        engine = await self._engine_of(self._model)
        try:
            return JSONResponse(await engine.tokenizer("/tokenizer_info"))
        except EngineError as error:
            raise engine_refusal(error, "model") from error

    async def _body(self, request: Request) -> Body:
        body = checked(request_parsing.decode_object(await request.body()))
        return body if body.get("model") is not None else body | {"model": self._model}

    async def _ask(self, param: str, path: str, body: Body) -> Body:
        engine = await self._engine_of(body["model"])
        try:
            return await engine.tokenizer(path, {name: body[name] for name in body if name != "model"})
        except EngineError as error:
            raise engine_refusal(error, param) from error


def _check_fields(body: Body, known: frozenset[str]) -> None:
    if not isinstance(body["model"], str):
        refuse("model", "is a text")
    for name in body:
        if name not in known and body[name] is not None:
            refuse(name[:80], "is not a field of this route")
