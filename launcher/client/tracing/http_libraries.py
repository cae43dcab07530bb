"""The methods by which this process's HTTP clients send a request, and the wrapper of each.

httpx, and httpx2 on which OpenAI's SDK stands since its release 3, send every request by one method of
`Client` or `AsyncClient`: an SDK's, LiteLLM's (whose aiohttp lies below), and each hop of a redirect. aiohttp
takes a middleware, which is asked at each hop as well.
Neighbours: `http_patch.py` puts them in place. Knows nothing of the time, or of the changes to a request.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

from launcher.client.failures import ClientError

# The context that is entered while a request is sent.
OnRequest = Callable[[Any], AbstractContextManager[None]]

_HTTPX_SEND = "_send_single_request"
"""No part of what httpx promises. `send`, which is one, sees a redirect's first request only, and all that it
adds goes on to the other host."""
_AIOHTTP_REQUEST = "_request"


@dataclass(frozen=True)
class SendMethod:
    """A library's method that sends; `wrap` makes ours of it."""

    owner: type
    name: str
    wrap: Callable[[Callable[..., Any], OnRequest], Callable[..., Any]]

    @property
    def original(self) -> Callable[..., Any]:
        """The method that is there now."""
        return self.owner.__dict__[self.name]


def send_methods() -> list[SendMethod]:
    """The methods of all installed libraries, because a client may be imported within a block.

    Raises ClientError for an unknown kind of httpx.
    """
    found = []
    for name in ("httpx", "httpx2"):
        if module := _import_if_installed(name):
            found += _httpx_methods(module)
    if aiohttp := _import_if_installed("aiohttp"):
        found += _aiohttp_methods(aiohttp)
    return found


def _import_if_installed(name: str) -> ModuleType | None:
    try:
        return import_module(name)
    except ModuleNotFoundError:
        return None


def _httpx_methods(module: ModuleType) -> list[SendMethod]:
    owners = [(module.Client, _wrap_sync), (module.AsyncClient, _wrap_async)]
    if not all(callable(owner.__dict__.get(_HTTPX_SEND)) for owner, _ in owners):
        raise ClientError(
            f"Requests of {module.__name__} {getattr(module, '__version__', '')} cannot be tagged here",
            why=f"its clients have no {_HTTPX_SEND}",
            hint="give each rollout a client with base_url=run.rollout_url(run.new_rollout())",
        )
    return [SendMethod(owner, _HTTPX_SEND, instead) for owner, instead in owners]


def _aiohttp_methods(module: ModuleType) -> list[SendMethod]:
    """None for a release without middlewares: its requests are tagged by their address only."""
    known = hasattr(module, "ClientMiddlewareType") and _AIOHTTP_REQUEST in module.ClientSession.__dict__
    return [SendMethod(module.ClientSession, _AIOHTTP_REQUEST, _wrap_aiohttp)] if known else []


def _wrap_sync(original: Callable[..., Any], on_request: OnRequest) -> Callable[..., Any]:
    @functools.wraps(original)
    def send(client: Any, request: Any, *more: Any, **named: Any) -> Any:
        with on_request(request):
            return original(client, request, *more, **named)

    return send


def _wrap_async(original: Callable[..., Any], on_request: OnRequest) -> Callable[..., Any]:
    @functools.wraps(original)
    async def send(client: Any, request: Any, *more: Any, **named: Any) -> Any:
        with on_request(request):
            return await original(client, request, *more, **named)

    return send


def _wrap_aiohttp(original: Callable[..., Any], on_request: OnRequest) -> Callable[..., Any]:
    async def hop(request: Any, handler: Callable[[Any], Any]) -> Any:
        with on_request(request):
            return await handler(request)

    @functools.wraps(original)
    async def request(session: Any, method: Any, url: Any, *more: Any, **named: Any) -> Any:
        chosen = named.get("middlewares")
        if chosen is None:
            chosen = getattr(session, "_middlewares", ())
        return await original(session, method, url, *more, **named | {"middlewares": (*chosen, hop)})

    return request
