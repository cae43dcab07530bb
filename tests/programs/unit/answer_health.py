"""Answers /api/health as SkyPilot's server does, with two versions: `answer_health.py RUNS INSTALLED [PORT]`.

It says its port first; without one it takes any.
"""

from __future__ import annotations

import http.server
import json
import sys

SAID = {"status": "healthy", "version": sys.argv[1], "version_on_disk": sys.argv[2]}


class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(SAID).encode())

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - the base class's name
        """Quiet."""


if __name__ == "__main__":
    server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[3]) if len(sys.argv) > 3 else 0), Answers)
    print(server.server_port, flush=True)
    server.serve_forever()
