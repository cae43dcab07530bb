"""An instance's metadata service (EC2's IMDSv2, the part SkyPilot's autodown needs): hands out the role's
credentials to whoever asks on the machine. Standard library only; runs inside a machine.
"""

from __future__ import annotations

import datetime
import http.server
import json
from pathlib import Path

_ROLE = "skypilot-v1"
_CREDENTIALS = "/latest/meta-data/iam/security-credentials"


def _answer(path: str) -> str | None:
    seed = json.loads(Path("/run/seed.json").read_text())
    expires = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=6)
    role = {
        "Code": "Success",
        "Type": "AWS-HMAC",
        "LastUpdated": "2026-01-01T00:00:00Z",
        "AccessKeyId": "ASIAROLE",
        "SecretAccessKey": "role",
        "Token": "token",
        "Expiration": expires.strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    return {
        _CREDENTIALS: _ROLE,
        f"{_CREDENTIALS}/{_ROLE}": json.dumps(role),
        "/latest/meta-data/placement/region": seed["region"],
        "/latest/meta-data/instance-id": seed["id"],
        "/latest/meta-data/instance-type": seed["type"],
    }.get(path.rstrip("/"))


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_PUT(self) -> None:
        self._say("token" if self.path == "/latest/api/token" else None)

    def do_GET(self) -> None:
        self._say(_answer(self.path))

    def _say(self, text: str | None) -> None:
        self.send_response(404 if text is None else 200)
        body = (text or "").encode()
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - the base class's name
        """Quiet."""


if __name__ == "__main__":
    http.server.ThreadingHTTPServer(("169.254.169.254", 80), _Handler).serve_forever()
