"""Debian's chromium without a screen, told what to do over its own protocol (CDP), and what it asked for.

Every request of a page is in `asked`; what the whole browser asked for, whoever wanted it, is in its net log
(`outside`). It is given a profile of its own and a network in which only this computer has a name.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import psutil

from runtime.shared.processes import preexec

PROGRAM = shutil.which("chromium")
_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-default-apps",
    "--disable-sync", "--disable-domain-reliability", "--disable-client-side-phishing-detection",
    "--disable-extensions", "--metrics-recording-only", "--remote-debugging-port=0",
    "--disable-features=OptimizationHints,MediaRouter,Translate,InterestFeedContentSuggestions",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
)  # fmt: skip
_PATIENCE_SECONDS = 60.0
_NO_PAGE, _NAVIGATIONS = "not an origin", ("main frame", "sub frame")
# Chromium's own pages, which no network has.
_INSIDE = ("chrome", "devtools", "about", "data", "blob", "file", "chrome-extension", "chrome-untrusted")


class Browser:
    """One page of it. Use `opened`."""

    def __init__(
        self, pid: int, socket: aiohttp.ClientWebSocketResponse, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._pid = pid
        self._socket = socket
        self._loop = loop
        self._ids = itertools.count(1)
        self.asked: list[str] = []
        # What the page's policy forbade, and what its scripts did not catch.
        self.complaints: list[str] = []

    def do(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol, and its answer."""
        return self._loop.run_until_complete(self._do(method, parameters))

    async def _do(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        number = next(self._ids)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        async with asyncio.timeout(_PATIENCE_SECONDS):
            while True:
                said = json.loads((await self._socket.receive()).data)
                if said.get("id") == number:
                    if "error" in said:
                        raise RuntimeError(f"{method}: {said['error']}")
                    return said["result"]
                self._hear(said)

    def _hear(self, said: dict[str, Any]) -> None:
        method, about = said.get("method"), said.get("params", {})
        if method == "Network.requestWillBeSent":
            self.asked.append(about["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = about["exceptionDetails"]
            self.complaints.append(str(details.get("exception", {}).get("description") or details["text"]))
        elif method == "Log.entryAdded" and about["entry"]["level"] == "error":
            self.complaints.append(about["entry"]["text"])

    def run(self, script: str) -> Any:
        """The value of an expression, awaited where it is a promise."""
        answer = self.do("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def go(self, address: str) -> None:
        self.do("Page.navigate", url=address)

    def until(self, condition: str, seconds: float = 30.0) -> Any:
        """The expression's value, once it is true."""
        bound = time.monotonic() + seconds
        while not (value := self.run(condition)):
            if time.monotonic() > bound:
                raise TimeoutError(f"{condition}: {self.run('document.body.innerText')[:800]}")
            time.sleep(0.05)
        return value

    def look(self, width: int, height: int = 900, dark: bool = False) -> None:
        """The window's size and the theme that the system has."""
        self.do(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.do("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self, to: Path, whole: bool = True, most_pixels: int = 6000) -> Path:
        """A PNG of the window, or of the whole page down to so many pixels."""
        size = self.do("Page.getLayoutMetrics")["cssContentSize"]
        clip = {
            "x": 0,
            "y": 0,
            "width": size["width"],
            "height": min(size["height"], most_pixels),
            "scale": 1,
        }
        extra = {"clip": clip, "captureBeyondViewport": True} if whole else {}
        to.write_bytes(base64.b64decode(self.do("Page.captureScreenshot", format="png", **extra)["data"]))
        return to

    def page_bytes(self) -> int:
        """The memory that the page's process has for itself, after a collection."""
        self.do("HeapProfiler.collectGarbage")
        family = [it for it in _family(self._pid) if "--type=renderer" in it.cmdline()]
        return max(it.memory_full_info().uss for it in family)

    def first_paint_seconds(self) -> float:
        """From the beginning of the navigation to the first content."""
        name = "'first-contentful-paint'"
        return self.until(f"performance.getEntriesByName({name})[0]?.startTime") / 1000


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[Browser]:
    """A browser whose profile and net log are in `folder`; its processes are gone afterwards."""
    assert PROGRAM, "apt-get install chromium"
    profile = folder / "profile"
    command = [PROGRAM, *_FLAGS, f"--user-data-dir={profile}", f"--log-net-log={folder / 'net.json'}"]
    command += ["about:blank"]
    shutil.rmtree(profile, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "chromium.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, preexec_fn=preexec(signal.SIGTERM)
        )
    loop, session = asyncio.new_event_loop(), None
    try:
        port = _port(profile / "DevToolsActivePort")
        session, socket = loop.run_until_complete(_connect(port))
        browser = Browser(process.pid, socket, loop)
        for domain in ("Page", "Runtime", "Log", "Network"):
            browser.do(f"{domain}.enable")
        yield browser
        loop.run_until_complete(_end(port))
        process.wait(30)
    finally:
        if session is not None:
            loop.run_until_complete(session.close())
        for one in [*_family(process.pid), process]:
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                one.kill()
        process.wait(30)
        loop.close()


def _family(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _port(file: Path) -> int:
    bound = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < bound:
        with contextlib.suppress(OSError, ValueError, IndexError):
            return int(file.read_text().splitlines()[0])
        time.sleep(0.05)
    raise TimeoutError("chromium did not start")


async def _connect(port: int) -> tuple[aiohttp.ClientSession, aiohttp.ClientWebSocketResponse]:
    session = aiohttp.ClientSession()
    async with session.get(f"http://127.0.0.1:{port}/json") as answer:
        page = next(it for it in await answer.json() if it["type"] == "page")
    return session, await session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0)


async def _end(port: int) -> None:
    """By the browser's own word, so that its net log is whole."""
    async with aiohttp.ClientSession() as session:
        async with session.get(f"http://127.0.0.1:{port}/json/version") as answer:
            address = (await answer.json())["webSocketDebuggerUrl"]
        async with session.ws_connect(address) as socket:
            await socket.send_json({"id": 1, "method": "Browser.close"})
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(10):
                    await socket.receive()


def outside(folder: Path) -> list[str]:
    """Of a browser that has ended: what its pages asked for that is not on this computer, by its net log.

    What chromium wants for itself (is there an update? which accounts?) has no page as its initiator.
    """
    log = json.loads((folder / "net.json").read_text())
    begins = log["constants"]["logEventTypes"]["URL_REQUEST_START_JOB"]
    found = []
    for it in log["events"]:
        asked = it.get("params", {})
        if it["type"] != begins or "url" not in asked:
            continue
        by_page = asked["initiator"] != _NO_PAGE or asked["request_type"] in _NAVIGATIONS
        parts = urlsplit(asked["url"])
        if by_page and parts.scheme not in _INSIDE and parts.hostname not in ("127.0.0.1", "localhost"):
            found.append(asked["url"])
    return found
