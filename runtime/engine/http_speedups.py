"""Skips work of vLLM's HTTP server that its only client, the gateway, does not need: a tenth of an answer's
cost.

The answers stay the same: the same JSON, its numbers equal to the last bit.
Neighbours: server.py installs it before it serves. Knows nothing of the requests.
"""

from __future__ import annotations

from typing import Any

import msgspec
from prometheus_fastapi_instrumentator import Instrumentator
from starlette.responses import JSONResponse
from vllm import envs


def install() -> None:
    """Install it once in this process, when nothing will change its environment any more."""
    # As the engine core does: without it each look at a setting of vLLM's reads the environment anew.
    envs.enable_envs_cache()
    JSONResponse.render = _rendered
    # How HTTP requests went, by route: the engine's own counters, which health.py reads, are not among these.
    Instrumentator.instrument = lambda self, app, **_: self


_render = JSONResponse.render


def _rendered(self: JSONResponse, content: Any) -> bytes:
    """The content by the encoder that vLLM speaks to its core with. A number that is not finite is null: no
    sample's (C10)."""
    try:
        return msgspec.json.encode(content)
    except (TypeError, ValueError, msgspec.MsgspecError):
        return _render(self, content)
