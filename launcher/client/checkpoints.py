"""The checkpoints that a run keeps: listed, and pinned so that they stay.

Neighbours: `connection.py` carries the requests, `steps.py` restores one. Knows nothing of what is in them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from urllib.parse import quote

from launcher.base.sanitize import one_line as sanitized
from launcher.client.answers import json_of
from launcher.client.bodies import CheckpointInfo
from launcher.client.connection import Connection


def kept(connection: Connection) -> list[CheckpointInfo]:
    """See `Session.checkpoints`."""
    found = [CheckpointInfo.model_validate(it) for it in connection.get_json("/slipway/checkpoints")]
    return sorted(found, key=lambda it: it.step)


def pin(connection: Connection, name: str, best_of: str | None) -> CheckpointInfo:
    """See `Session.pin`."""
    named = f"?best_of={quote(best_of, safe='')}" if best_of is not None else ""
    answer = connection.ask("POST", f"/slipway/checkpoints/{name}/pin{named}")
    pinned = CheckpointInfo.model_validate(json_of(answer))
    if pinned.let_go:
        _say_let_go(connection.model, pinned.let_go)
    return pinned


def _say_let_go(model: str, checkpoints: Iterable[str]) -> None:
    names = ", ".join(f"{sanitized(model)}@v{int(it.removeprefix('step-'))}" for it in checkpoints)
    sys.stderr.write(
        f"slipway: no longer pinned, because others were pinned since: {names}. Pin again what a program "
        "still names, while it answers\n"
    )
    sys.stderr.flush()
