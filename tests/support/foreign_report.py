"""What a program in somebody else's environment says of its rollouts, once they are trained.

Neighbours: the programs in `tests/programs/foreign/`; the tests read it. Imports our client alone.
"""

from __future__ import annotations

from typing import Any

from launcher.client import group


def trained(run: Any, rollouts: Any) -> dict[str, Any]:
    """Train them as one group; their names, their requests, and the step's counts."""
    return {
        "rollouts": [it.id for it in rollouts],
        "requests": [it.requests for it in rollouts],
        "astray": run.astray,
        "counts": run.step([group("sums", rollouts)]).counts.model_dump(),
    }
