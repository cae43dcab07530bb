"""The door of a small run: HTTP/1.1 on a port of loopback, as the gateway's.

Neighbours: `small_run.py` says what each request is answered.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

# Status, body and headers.
Reply = tuple[int, Any, Mapping[str, str]]


@dataclass(frozen=True)
class Request:
    """What came to the door; of a GET there is no content."""

    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    content: bytes | None


class Door:
    """Open until `close`. `answer` says what a request is answered; None: its connection is lost."""

    def __init__(self, answer: Callable[[Request], Reply | None]) -> None:
        handler = type("Handler", (_Handler,), {"answer": staticmethod(answer)})
        self._server = _Server(("127.0.0.1", 0), handler)
        threading.Thread(target=self._server.serve_forever, args=(0.005,), daemon=True).start()

    @property
    def port(self) -> int:
        return self._server.server_port

    def go(self) -> None:
        """Away for good: whoever is connected is cut off, and nobody listens any more."""
        self._server.gone = True
        self._server.shutdown()
        self._server.server_close()

    def close(self) -> None:
        if self._server.gone:
            return
        self._server.shutdown()
        self._server.server_close()


def error(status: int, message: str, code: str | None = None) -> tuple[int, dict[str, Any]]:
    """Status and body of what is refused."""
    return status, {"error": {"message": message, "type": "an_error", "param": None, "code": code}}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256  # as many clients at once as a step has rollouts
    gone = False


class _Handler(BaseHTTPRequestHandler):
    """With keep-alive."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one packet: in two, the second waits 40 ms for the first's ACK
    answer: Callable[[Request], Reply | None]

    def do_GET(self) -> None:
        self._handle(None)

    def do_POST(self) -> None:
        self._handle(self.rfile.read(int(self.headers.get("content-length", 0))))

    def _handle(self, content: bytes | None) -> None:
        if self._is_gone():
            self.close_connection = True
            return
        address = urlsplit(self.path)
        headers = {name.lower(): value for name, value in self.headers.items()}
        reply = self.answer(Request(address.path, parse_qs(address.query), headers, content))
        if reply is None or self._is_gone():
            self.close_connection = True
        else:
            self._send(*reply)

    def _is_gone(self) -> bool:
        return isinstance(self.server, _Server) and self.server.gone

    def _send(self, status: int, body: Any, extra: Mapping[str, str]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"content-type": "application/json", **extra}.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
        self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - http.server's name
        """Tests print nothing."""
