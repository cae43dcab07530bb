"""One HTTP request over a Unix socket, for callers that ask rarely and need no event loop.

Neighbours: `local_machine.py` asks a starting runtime whether it is ready. The relay and the client have
their own.
"""

from __future__ import annotations

import http.client
import json
import socket
from pathlib import Path
from typing import Any


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_seconds: float) -> None:
        super().__init__("localhost", timeout=timeout_seconds)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def get_json(
    socket_path: Path, path: str, token: str | None = None, timeout_seconds: float = 5.0
) -> tuple[int, Any]:
    """GET: the status and the decoded body (None when it is no JSON). Raises OSError if none answers."""
    connection = _Connection(socket_path, timeout_seconds)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {token}"} if token else {})
        answer = connection.getresponse()
        content = answer.read()
    except http.client.HTTPException as error:
        raise ConnectionError(f"{path}: not an HTTP answer ({error!r})") from error
    finally:
        connection.close()
    try:
        return answer.status, json.loads(content)
    except ValueError:
        return answer.status, None
