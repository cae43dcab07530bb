"""Tells whether a request samples from a run, by its method and address; and finds the rollout in its path.

Neighbours: `rollout.py` asks, about requests that `http_patch.py` sees. Pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from launcher.client.tracing.http_patch import DEFAULT_PORTS, HttpRequest, Url

_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
_PATH = re.compile(
    r"(?:/rollouts/(?P<rollout>[^/]+))?"
    r"/(?:v1/(?:chat/completions|completions|responses|messages)|inference/v1/generate)"
)


@dataclass(frozen=True)
class SamplingRequest:
    """A request that asks the run to sample; `rollout` is the one in its path."""

    rollout: str | None


def match_sampling_request(root: str, request: HttpRequest) -> SamplingRequest | None:
    """None for a request to another server, or to another route of the run."""
    here = urlsplit(root)
    if request.method != "POST" or not _is_same_host(
        request.url, here.scheme, here.hostname or "", here.port
    ):
        return None
    path = request.url.path
    below = here.path.rstrip("/")
    found = _PATH.fullmatch(path.removeprefix(below)) if path.startswith(below) else None
    if found is None:
        return None
    return SamplingRequest(found["rollout"])


def _is_same_host(url: Url, scheme: str, host: str, port: int | None) -> bool:
    """The names of this computer for itself are one."""
    usual = DEFAULT_PORTS.get(scheme)
    same = url.host == host or {url.host or "", host} <= _LOOPBACK
    return same and url.scheme == scheme and (url.port or usual) == (port or usual)
