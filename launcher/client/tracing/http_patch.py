"""A patch of this process's HTTP clients: in place while it has a user, and removed with the last one.

Neighbours: `http_libraries.py` knows the clients, `rollout.py` changes the requests. Knows nothing of
rollouts, runs or headers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from launcher.client.tracing.http_libraries import OnRequest, SendMethod, send_methods

# The request that is being sent here. It may cause another request: an application that a test client calls
# in this process sends one to the run from within.
_sending: ContextVar[tuple[object, ...]] = ContextVar("slipway_sending", default=())
# The ports of a URL that names none.
DEFAULT_PORTS = {"http": 80, "https": 443}


class Url(Protocol):
    """The attributes that the libraries' URLs have in common."""

    @property
    def scheme(self) -> str: ...
    @property
    def host(self) -> str | None: ...
    @property
    def port(self) -> int | None: ...
    @property
    def path(self) -> str: ...


class HttpRequest(Protocol):
    """The attributes that their requests have in common."""

    method: str
    headers: MutableMapping[str, str]

    @property
    def url(self) -> Url: ...


class _Patch:
    """A method of ours in the place of theirs. Code that has wrapped it since keeps one that does nothing."""

    def __init__(self, method: SendMethod, on_request: OnRequest) -> None:
        self._method = method
        self._on_request = on_request
        self._is_active = True
        self._original = method.original
        self._replacement: Callable[..., Any] = method.wrap(self._original, self._once)
        setattr(method.owner, method.name, self._replacement)

    def remove(self) -> None:
        self._is_active = False
        if self._method.original is self._replacement:
            setattr(self._method.owner, self._method.name, self._original)

    @contextmanager
    def _once(self, request: HttpRequest) -> Iterator[None]:
        """A request that one library sends through another is one request."""
        url = request.url
        sent = request.method, url.scheme, url.host, url.port or DEFAULT_PORTS.get(url.scheme), url.path
        if not self._is_active or _sending.get() == sent:
            yield
            return
        outside = _sending.set(sent)
        try:
            with self._on_request(request):
                yield
        finally:
            _sending.reset(outside)


class HttpPatch:
    """Enters `on_request` for each request of this process while the patch has a user."""

    def __init__(self, on_request: OnRequest) -> None:
        self._on_request = on_request
        self._lock = threading.Lock()
        self._users = 0
        self._patches: list[_Patch] = []

    def acquire(self) -> None:
        """Raises ClientError if a library is none that is known here; then nothing was touched."""
        with self._lock:
            if not self._users:
                self._patches = [_Patch(method, self._on_request) for method in send_methods()]
            self._users += 1

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                for put in self._patches:
                    put.remove()
                self._patches = []
