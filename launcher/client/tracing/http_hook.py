"""A hand in the HTTP clients of this process, there while somebody needs it and gone with the last of them.

httpx, and httpx2 on which OpenAI's SDK stands since its release 3, send every request by one method of
`Client` or `AsyncClient`: an SDK's, LiteLLM's (whose aiohttp lies below), and each hop of a redirect.
Neighbours: `rollout.py` says what to do with a request. Knows nothing of rollouts, runs or headers.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, MutableMapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, Protocol

from launcher.client.failures import ClientError

_LIBRARIES = ("httpx", "httpx2")
# No part of what these libraries promise; `send`, which is one, sees a redirect's first request only, and all
# that it adds goes on to the other host.
_METHOD = "_send_single_request"


class Url(Protocol):
    """What the libraries' URLs have in common."""

    @property
    def scheme(self) -> str: ...
    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int | None: ...
    @property
    def path(self) -> str: ...


class Request(Protocol):
    """What their requests have in common."""

    method: str
    headers: MutableMapping[str, str]

    @property
    def url(self) -> Url: ...


# What is done to a request for the time of its sending.
Around = Callable[[Any], AbstractContextManager[None]]


@dataclass
class _Put:
    """A method of ours in the place of theirs. Whoever has wrapped it since keeps one that does nothing."""

    owner: type
    original: Callable[..., Any]
    around: Around
    ours: Callable[..., Any] | None = None
    live: bool = True

    def remove(self) -> None:
        self.live = False
        if self.owner.__dict__.get(_METHOD) is self.ours:
            setattr(self.owner, _METHOD, self.original)


class HttpHook:
    """`around` is entered for each request of this process while anybody holds the hook."""

    def __init__(self, around: Around) -> None:
        self._around = around
        self._lock = threading.Lock()
        self._holders = 0
        self._put: list[_Put] = []

    def hold(self) -> None:
        """Raises ClientError where a library is none that is known here; then nothing was touched."""
        with self._lock:
            if not self._holders:
                classes = [it for module in _modules() for it in _classes(module)]
                self._put = [_put(owner, is_async, self._around) for owner, is_async in classes]
            self._holders += 1

    def let_go(self) -> None:
        with self._lock:
            self._holders -= 1
            if not self._holders:
                for put in self._put:
                    put.remove()
                self._put = []


def _modules() -> list[ModuleType]:
    """Those that are installed: an SDK may be imported within the block."""
    found = []
    for name in _LIBRARIES:
        try:
            found.append(import_module(name))
        except ModuleNotFoundError:
            continue
    return found


def _classes(module: ModuleType) -> list[tuple[type, bool]]:
    classes = [(module.Client, False), (module.AsyncClient, True)]
    if not all(callable(owner.__dict__.get(_METHOD)) for owner, _ in classes):
        raise ClientError(
            f"Requests of {module.__name__} {getattr(module, '__version__', '')} cannot be tagged here",
            why=f"its clients have no {_METHOD}",
            hint="give each rollout a client with base_url=run.rollout_url(run.new_rollout())",
        )
    return classes


def _put(owner: type, is_async: bool, around: Around) -> _Put:
    put = _Put(owner, owner.__dict__[_METHOD], around)
    put.ours = (_async_method if is_async else _method)(put)
    setattr(owner, _METHOD, put.ours)
    return put


def _method(put: _Put) -> Callable[..., Any]:
    @functools.wraps(put.original)
    def send(client: Any, request: Any, *more: Any, **named: Any) -> Any:
        if not put.live:
            return put.original(client, request, *more, **named)
        with put.around(request):
            return put.original(client, request, *more, **named)

    return send


def _async_method(put: _Put) -> Callable[..., Any]:
    @functools.wraps(put.original)
    async def send(client: Any, request: Any, *more: Any, **named: Any) -> Any:
        if not put.live:
            return await put.original(client, request, *more, **named)
        with put.around(request):
            return await put.original(client, request, *more, **named)

    return send
