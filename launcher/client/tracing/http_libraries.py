"""The methods by which this process's HTTP clients send a request, and what stands in for each of them.

httpx, and httpx2 on which OpenAI's SDK stands since its release 3, send every request by one method of
`Client` or `AsyncClient`: an SDK's, LiteLLM's (whose aiohttp lies below), and each hop of a redirect. aiohttp
takes a middleware, which is asked at each hop as well.
Neighbours: `http_hook.py` puts them in place. Knows nothing of when, or of what is done to a request.
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

# What is entered for the time of a request's sending.
Around = Callable[[Any], AbstractContextManager[None]]

_SENDING = "_send_single_request"
"""No part of what httpx promises. `send`, which is one, sees a redirect's first request only, and all that it
adds goes on to the other host."""
_REQUESTING = "_request"


@dataclass(frozen=True)
class Method:
    """A method of theirs; `instead` makes ours of it."""

    owner: type
    name: str
    instead: Callable[[Callable[..., Any], Around], Callable[..., Any]]

    @property
    def theirs(self) -> Callable[..., Any]:
        """What is there now."""
        return self.owner.__dict__[self.name]


def methods() -> list[Method]:
    """Of all libraries that are installed: a client may be imported within a block.

    Raises ClientError for an httpx that is none which is known here.
    """
    found = []
    for name in ("httpx", "httpx2"):
        if module := _module(name):
            found += _of_httpx(module)
    if aiohttp := _module("aiohttp"):
        found += _of_aiohttp(aiohttp)
    return found


def _module(name: str) -> ModuleType | None:
    try:
        return import_module(name)
    except ModuleNotFoundError:
        return None


def _of_httpx(module: ModuleType) -> list[Method]:
    owners = [(module.Client, _in_line), (module.AsyncClient, _awaited)]
    if not all(callable(owner.__dict__.get(_SENDING)) for owner, _ in owners):
        raise ClientError(
            f"Requests of {module.__name__} {getattr(module, '__version__', '')} cannot be tagged here",
            why=f"its clients have no {_SENDING}",
            hint="give each rollout a client with base_url=run.rollout_url(run.new_rollout())",
        )
    return [Method(owner, _SENDING, instead) for owner, instead in owners]


def _of_aiohttp(module: ModuleType) -> list[Method]:
    """None for a release without middlewares: its requests are tagged by their address only."""
    known = hasattr(module, "ClientMiddlewareType") and _REQUESTING in module.ClientSession.__dict__
    return [Method(module.ClientSession, _REQUESTING, _with_middleware)] if known else []


def _in_line(theirs: Callable[..., Any], around: Around) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def send(client: Any, request: Any, *more: Any, **named: Any) -> Any:
        with around(request):
            return theirs(client, request, *more, **named)

    return send


def _awaited(theirs: Callable[..., Any], around: Around) -> Callable[..., Any]:
    @functools.wraps(theirs)
    async def send(client: Any, request: Any, *more: Any, **named: Any) -> Any:
        with around(request):
            return await theirs(client, request, *more, **named)

    return send


def _with_middleware(theirs: Callable[..., Any], around: Around) -> Callable[..., Any]:
    async def hop(request: Any, handler: Callable[[Any], Any]) -> Any:
        with around(request):
            return await handler(request)

    @functools.wraps(theirs)
    async def request(session: Any, method: Any, url: Any, *more: Any, **named: Any) -> Any:
        chosen = named.get("middlewares")
        if chosen is None:
            chosen = getattr(session, "_middlewares", ())
        return await theirs(session, method, url, *more, **named | {"middlewares": (*chosen, hop)})

    return request
