"""A gateway in the test's own process, before engines that have sockets in a folder; no HTTP to it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from runtime.gateway.gateway import Components, build_components
from runtime.shared.runtime_config import RuntimeConfig


@asynccontextmanager
async def gateway_here(
    state: Path, sockets: Path, engines: int, model: str = ""
) -> AsyncIterator[Components]:
    """Its parts, all engines taken for ready, none looked after."""
    config = {
        "run_id": "test", "model_path": model, "state_dir": str(state), "socket_dir": str(sockets),
        "engines": engines,
    }  # fmt: skip
    parts = build_components(RuntimeConfig.model_validate(config))
    for engine in parts.pool.engines:
        engine.ready = True
    try:
        yield parts
    finally:
        for client in parts.clients:
            await client.close()


async def ask(
    parts: Components,
    rollout: str | None,
    messages: list[Any],
    headers: Mapping[str, str] = {},
    **fields: Any,
) -> tuple[int, Any]:
    """The status and body of a chat's answer, by the door."""
    body = json.dumps({"model": "policy", "messages": messages, **fields}).encode()
    named = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"headers": named, "path_params": {} if rollout is None else {"rollout": rollout}}
    sent: list[dict[str, Any]] = []
    unread = [{"type": "http.request", "body": body}]

    async def receive() -> dict[str, Any]:
        if unread:
            return unread.pop()
        await asyncio.Event().wait()  # it does not hang up
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await parts.completions.serve("chat", scope, receive, send)
    return sent[0]["status"], json.loads(b"".join(part["body"] for part in sent[1:]))
