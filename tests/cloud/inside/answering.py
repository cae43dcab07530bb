"""A gateway as far as a link can see one, on a machine: HTTP on a Unix socket, standard library only.

    python answering.py SOCKET

POST works for a while and counts; a request id that was seen gets the stored answer. GET /count: how often
it worked. GET /healthz: ok.
"""

import http.server
import json
import socketserver
import sys
import threading
import time

_WORK_SECONDS = 1.0
_lock = threading.Lock()
_answers: dict[str, threading.Event] = {}
_numbers: dict[str, int] = {}


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._say({"count": len(_numbers)} if self.path == "/count" else {"ok": True})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        request = self.headers["X-Slipway-Request"]
        with _lock:
            first = request not in _answers
            done = _answers.setdefault(request, threading.Event())
        if first:
            time.sleep(_WORK_SECONDS)
            with _lock:
                _numbers[request] = len(_numbers) + 1
            done.set()
        done.wait()
        self._say({"number": _numbers[request], "asked": json.loads(body)})

    def _say(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def address_string(self) -> str:
        return "a Unix socket"

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - the base class's name
        """Quiet."""


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 1024


if __name__ == "__main__":
    _Server(sys.argv[1], _Handler).serve_forever()
