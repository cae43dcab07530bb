"""A gateway as far as a link can see one, on a machine: HTTP on a Unix socket, standard library only.

    python answering.py SOCKET

GET, whatever it asks for: ok.
"""

import http.server
import json
import socketserver
import sys


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        body = json.dumps({"ok": True}).encode()
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
