"""Proxies of the user's environment: never for this computer's own addresses, and some for a rented machine.

Neighbours: `records/endpoint.py` makes the program's environment with it, `skypilot/sky_home.py` SkyPilot's,
`credentials.py` a rented runtime's. Reads no environment of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from urllib.parse import urlsplit

NAMES = ("http_proxy", "https_proxy", "all_proxy")
_EXCEPT = ("no_proxy", "NO_PROXY")
_HERE = ("127.0.0.1", "localhost")


def is_proxy(name: str) -> bool:
    """Whether a variable of this name holds a proxy's address, which may have a password in it."""
    return name.lower() in NAMES


def no_proxy(environ: Mapping[str, str]) -> dict[str, str]:
    """`NO_PROXY` in both spellings, with the user's exceptions and this computer's own addresses."""
    kept: dict[str, str] = {}
    for name, other in zip(_EXCEPT, reversed(_EXCEPT), strict=True):
        words = [word.strip() for word in (environ.get(name) or environ.get(other, "")).split(",")]
        own = [word for word in _HERE if word not in words]
        # "*" means everything only where it stands alone.
        kept[name] = "*" if "*" in words else ",".join([*filter(None, words), *own])
    return kept


def for_program(environ: Mapping[str, str]) -> dict[str, str]:
    """What to add to a program's environment, so that no proxy stands before 127.0.0.1.

    On a Mac the system's settings may name a proxy. Python's clients ask for it only while no such variable
    is set, so it becomes one beside `NO_PROXY`.
    """
    if any(is_proxy(name) or name in _EXCEPT for name in environ):
        return no_proxy(environ)
    return _system_proxies() | no_proxy(environ)


def is_here(url: str) -> bool:
    """Whether a URL, or a proxy's address without a scheme, means this computer; or nothing at all."""
    try:
        host = urlsplit(url if "://" in url else f"http://{url}").hostname or ""
    except ValueError:
        return True
    return host in {"", "localhost", "::1", "0.0.0.0"} or host.startswith("127.")


def user_of(url: str) -> str | None:
    """`name:password` of a URL; None if there is no password in it."""
    user = url.rpartition("@")[0].rpartition("//")[2]
    return user if ":" in user else None


def _system_proxies() -> dict[str, str]:
    if sys.platform != "darwin":
        return {}
    import urllib.request

    return {f"{scheme}_proxy": url for scheme, url in urllib.request.getproxies().items()}
