"""A hand in the HTTP clients of this process, there while somebody holds it and gone with the last of them.

Neighbours: `http_libraries.py` knows the clients, `rollout.py` says what to do with a request. Knows nothing
of rollouts, runs or headers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from launcher.client.tracing.http_libraries import Around, Method, methods

# The request that is being sent here. What it leads to may be a request of its own: an application that a
# test client calls in this process asks the run from within.
_sending: ContextVar[tuple[object, ...]] = ContextVar("slipway_sending", default=())
# What a URL means that names none.
PORTS = {"http": 80, "https": 443}


class Url(Protocol):
    """What the libraries' URLs have in common."""

    @property
    def scheme(self) -> str: ...
    @property
    def host(self) -> str | None: ...
    @property
    def port(self) -> int | None: ...
    @property
    def path(self) -> str: ...


class HttpRequest(Protocol):
    """What their requests have in common."""

    method: str
    headers: MutableMapping[str, str]

    @property
    def url(self) -> Url: ...


class _Put:
    """A method of ours in the place of theirs. Whoever has wrapped it since keeps one that does nothing."""

    def __init__(self, method: Method, around: Around) -> None:
        self._method = method
        self._around = around
        self._live = True
        self._theirs = method.theirs
        self._ours: Callable[..., Any] = method.instead(self._theirs, self._once)
        setattr(method.owner, method.name, self._ours)

    def remove(self) -> None:
        self._live = False
        if self._method.theirs is self._ours:
            setattr(self._method.owner, self._method.name, self._theirs)

    @contextmanager
    def _once(self, request: HttpRequest) -> Iterator[None]:
        """What one library sends by another is one request."""
        url = request.url
        sent = request.method, url.scheme, url.host, url.port or PORTS.get(url.scheme), url.path
        if not self._live or _sending.get() == sent:
            yield
            return
        outside = _sending.set(sent)
        try:
            with self._around(request):
                yield
        finally:
            _sending.reset(outside)


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
                self._put = [_Put(method, self._around) for method in methods()]
            self._holders += 1

    def let_go(self) -> None:
        with self._lock:
            self._holders -= 1
            if not self._holders:
                for put in self._put:
                    put.remove()
                self._put = []
