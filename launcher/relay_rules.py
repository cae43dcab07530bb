"""What the relay lets in, which headers it passes on, and how it says no.

Neighbours: `relay.py` asks. Pure functions on headers; knows nothing of sockets or of asking again.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy

LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]", "::1"})
# RFC 9110, 7.6.1: these belong to one connection, not to the message.
_HOP_BY_HOP = frozenset(
    {
        "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection",
        "te", "trailer", "transfer-encoding", "upgrade",
    }
)  # fmt: skip
# Ours to set for the next connection.
_OWN = frozenset({"host", "content-length", "expect"})


def refusal(headers: Mapping[str, str], target: str) -> str | None:
    """Why a request may not pass: it came for another host (DNS rebinding), or from another site's page."""
    host = headers.get("Host", "")
    if _host_name(f"//{host}") not in LOOPBACK:
        return f"this door answers 127.0.0.1 and localhost, not {host!r}"
    origin = headers.get("Origin")
    if origin is not None and _host_name(origin) not in LOOPBACK:
        return f"pages of {origin!r} may not use this door"
    if not target.startswith("/"):
        return f"this door is no general proxy: {target!r}"
    return None


def _host_name(address: str) -> str:
    """The host of an address; "" where it has none or is not one."""
    try:
        return urlsplit(address).hostname or ""
    except ValueError:  # such as an open bracket
        return ""


def passed_on(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """The headers of the message, in their order, without those of the connection."""
    named = {name.strip().lower() for line in headers.getall("Connection", []) for name in line.split(",")}
    dropped = _HOP_BY_HOP | _OWN | named
    return CIMultiDict((key, value) for key, value in headers.items() if key.lower() not in dropped)


def error(status: int, message: str, code: str, retry_after_seconds: int | None = None) -> web.StreamResponse:
    """An answer of the relay's own, in the form every OpenAI client understands."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return web.json_response(
        {"error": {"message": message, "type": kind, "param": None, "code": code}},
        status=status,
        headers={"Retry-After": str(retry_after_seconds)} if retry_after_seconds else None,
    )
