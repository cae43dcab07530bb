"""The HTTP routes of a run's page: for browsers that `launch open` let in, and for the run's token.

    POST /page/link            with the token: a link that lets one browser in, once, within minutes
    GET  /page/enter/CODE      that link: sets the cookie and goes on to the page
    GET  /page/PLACE/…         the page's files and its data, with the cookie or the token
    GET  /page/PLACE/data/RUN/end.json    is answered when the run has ended

The token itself is in no address. A cookie alone can only read, and only for the page itself: a request by
another page is refused by the browser's own headers, even with the cookie.
Neighbours: `relay.py` hands over requests for `/page`, after its own rules of host and origin; `page_auth.py`
has the keys, `dashboard/` the page. Files are read in a thread of their own, one at a time.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from aiohttp import web

from launcher.dashboard import page_files
from launcher.proxy import relay_rules
from launcher.proxy.page_auth import COOKIE, LINK_SECONDS, PageAuth

_ROOT = "/page"
_ENTER = "/page/enter/"
_DATA = re.compile(r"data/([\w./-]{1,160})\.json")
_READING = ("GET", "HEAD")
_SENDING_SECONDS = 0.1
# How soon it is noticed that a page is closed.
_GONE_SECONDS = 5.0
_TITLE = (
    "<!doctype html><html lang=en><meta charset=utf-8><title>Slipway</title><link rel=icon href='data:,'>"
)
# For a browser that has no cookie yet, or whose link was used.
_NO_ENTRY = _TITLE + "<h1>{title}</h1><p>{text}</p><pre>launch open RUN</pre></html>"
_ENTER_PAGE = (
    _TITLE + '<meta http-equiv=refresh content="0; url={place}"><a href="{place}">The run\'s page</a></html>'
)

Status = Callable[[], Awaitable[Mapping[str, Any] | None]]
_Read = TypeVar("_Read")


class Page(Protocol):
    """The page's data (`dashboard/pages.py`). It reads files."""

    current: str | None

    def get(
        self,
        name: str,
        query: Mapping[str, str],
        runtime: Mapping[str, Any] | None,
        relay: Mapping[str, Any] | None,
    ) -> Any: ...


def is_page_path(target: str) -> bool:
    """Whether a request is for the page."""
    path = target.partition("?")[0]
    return path == _ROOT or path.startswith(f"{_ROOT}/")


class PageRoutes:
    """The routes of one run. `status`: the runtime's own status now; `relay_status`: the relay's."""

    def __init__(
        self, page: Page, token: str, status: Status, relay_status: Callable[[], Mapping[str, Any]]
    ) -> None:
        self._page = page
        self._token: str | None = token
        self._status = status
        self._relay_status = relay_status
        self._keys = PageAuth()
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="page")
        self._over = asyncio.Event()
        # Pages that wait to hear how the run ends.
        self.waiting = 0

    def close(self) -> None:
        """Read no more."""
        self._reader.shutdown(wait=False, cancel_futures=True)

    def forget_token(self) -> None:
        """From now on only a browser that was let in sees the page."""
        self._token = None
        self._keys.forget_links()

    async def show_end(self) -> None:
        """Tell the pages that wait that the run is over; returns when they have heard it."""
        self._over.set()
        while self.waiting:
            await asyncio.sleep(_SENDING_SECONDS)
        await asyncio.sleep(_SENDING_SECONDS)

    async def answer(self, request: web.BaseRequest, authenticate: Callable[[], None]) -> web.Response:
        """The answer; no body is read. `authenticate` is called for a client that may see the page."""
        answer = await self._answer(request, authenticate)
        answer.headers.update(page_files.HEADERS)
        if answer.status >= 400 or request.body_exists:
            answer.force_close()
        return answer

    async def _answer(self, request: web.BaseRequest, authenticate: Callable[[], None]) -> web.Response:
        path = request.raw_path.partition("?")[0]
        if reason := _cross_site(request):
            return web.Response(status=403, text=reason)
        token = self._token
        has_token = token is not None and relay_rules.without_token(request.headers, token) is None
        if path == f"{_ROOT}/link":
            return self._link(request.method, has_token, authenticate)
        if request.method not in _READING:
            return web.Response(status=405, text="the page is only read", headers={"Allow": "GET, HEAD"})
        if path.startswith(_ENTER):
            return self._enter(request.method, path.removeprefix(_ENTER), authenticate)
        if not has_token and not self._has_cookie(request, path):
            return _no_entry("This page opens from a terminal", "On the computer that runs it, type")
        authenticate()
        inside = self._is_inside(path)
        found = await self._found(path.removeprefix(self._keys.place), request) if inside else None
        if found is None:
            return web.Response(status=404, text="there is no such page")
        content, kind = found
        return web.Response(body=content, content_type=kind, charset="utf-8")

    # ------------------------------------------------------------- access

    def _link(self, method: str, has_token: bool, authenticate: Callable[[], None]) -> web.Response:
        if not has_token:
            return web.Response(status=401, text="a link is given to who shows the run's token")
        authenticate()
        if method != "POST":
            return web.Response(status=405, text="a link is asked for by POST", headers={"Allow": "POST"})
        link = {"path": f"{_ENTER}{self._keys.new_link()}", "seconds": LINK_SECONDS, "page": self._keys.place}
        return web.json_response(link)

    def _enter(self, method: str, code: str, authenticate: Callable[[], None]) -> web.Response:
        # A look ahead, by HEAD, must not use it up.
        if method != "GET" or not self._keys.use(code):
            return _no_entry("This link was used, or is too old", "For a new one, type")
        authenticate()
        # By a page that goes on by itself, because a browser that came from elsewhere sends no strict cookie
        # with a redirected request.
        body = _ENTER_PAGE.format(place=self._keys.place)
        headers = {"Set-Cookie": self._keys.set_cookie()}
        return web.Response(text=body, content_type="text/html", headers=headers)

    def _has_cookie(self, request: web.BaseRequest, path: str) -> bool:
        return self._is_inside(path) and self._keys.is_cookie(request.cookies.get(COOKIE))

    def _is_inside(self, path: str) -> bool:
        return path.startswith(self._keys.place)

    # ------------------------------------------------------------- content

    async def _found(self, name: str, request: web.BaseRequest) -> tuple[bytes, str] | None:
        """The content and its kind."""
        name = name or page_files.INDEX
        if name in page_files.NAMES:
            kind = page_files.KINDS[name[name.rindex(".") :]]
            return await self._read(lambda: page_files.read(name)), kind
        if (named := _DATA.fullmatch(name)) is None:
            return None
        name, head = named[1], f"{self._page.current}/run"
        if name == f"{self._page.current}/end":
            return await self._end(request), "application/json"
        runtime = await self._status() if name == head else None
        relay = self._relay_status() if name == head else None
        found = await self._read(lambda: self._piece(name, request.query, runtime, relay))
        return None if found is None else (found, "application/json")

    async def _end(self, request: web.BaseRequest) -> bytes:
        """The run's head and steps once it has ended: a page asks for them as soon as it is open. A page that
        was closed meanwhile does not wait any more."""
        self.waiting += 1
        try:
            while not self._over.is_set() and request.transport and not request.transport.is_closing():
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._over.wait(), _GONE_SECONDS)
            return await self._read(lambda: page_files.as_json(self._last_pieces()))
        finally:
            self.waiting -= 1

    def _last_pieces(self) -> dict[str, Any]:
        return {
            part: self._page.get(f"{self._page.current}/{part}", {}, None, None)
            for part in ("run", "steps", "texts", "settings")
        }

    def _piece(
        self,
        name: str,
        query: Mapping[str, str],
        runtime: Mapping[str, Any] | None,
        relay: Mapping[str, Any] | None,
    ) -> bytes | None:
        found = self._page.get(name, query, runtime, relay)
        return None if found is None else page_files.as_json(found)

    async def _read(self, read: Callable[[], _Read]) -> _Read:
        return await asyncio.get_running_loop().run_in_executor(self._reader, read)


def _cross_site(request: web.BaseRequest) -> str | None:
    """The reason to refuse a browser's request, by its headers about the page that asks; pages of other ports
    of this computer count as others too. Only browsers send these headers."""
    origin = request.headers.get("Origin")
    if origin is not None and origin != f"http://{request.headers.get('Host')}":
        return "other pages may not read this one"
    site = request.headers.get("Sec-Fetch-Site", "none")
    if site in ("none", "same-origin") or request.headers.get("Sec-Fetch-Mode") == "navigate":
        return None
    return "other pages may not read this one"


def _no_entry(title: str, text: str) -> web.Response:
    return web.Response(status=401, text=_NO_ENTRY.format(title=title, text=text), content_type="text/html")
