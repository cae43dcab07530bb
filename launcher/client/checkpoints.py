"""The checkpoints that a run keeps: listed, and pinned so that they stay.

Neighbours: `connection.py` carries the requests, `steps.py` restores one. Knows nothing of their content.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from urllib.parse import quote

from launcher.base.sanitize import one_line as sanitized
from launcher.client.answers import parse_json
from launcher.client.connection import Connection
from launcher.client.schema import CheckpointInfo


def list_checkpoints(connection: Connection) -> list[CheckpointInfo]:
    """See `Session.checkpoints`."""
    found = [CheckpointInfo.model_validate(it) for it in connection.get_json("/slipway/checkpoints")]
    return sorted(found, key=lambda it: it.step)


def pin(connection: Connection, name: str, best_of: str | None) -> CheckpointInfo:
    """Pin a checkpoint: it is kept, and with `best_of` it replaces the one pinned as the best of that name.
    See `Session.pin`."""
    named = f"?best_of={quote(best_of, safe='')}" if best_of is not None else ""
    answer = connection.request("POST", f"/slipway/checkpoints/{name}/pin{named}")
    pinned = CheckpointInfo.model_validate(parse_json(answer))
    if pinned.let_go:
        _log_unpinned(connection.model, pinned.let_go)
    return pinned


def _log_unpinned(model: str, checkpoints: Iterable[str]) -> None:
    names = ", ".join(f"{sanitized(model)}@v{int(it.removeprefix('step-'))}" for it in checkpoints)
    sys.stderr.write(
        f"slipway: no longer pinned, because others were pinned since: {names}. Pin again what a program "
        "still names, while it answers\n"
    )
    sys.stderr.flush()
