"""The timeout budget of a run: how long each process waits for a runtime that does not answer.

    relay      retries for so long after a request's first loss, then answers 503
    run        ends after so long without an answer: at the first status, and while it works
    program    finds it in its environment; our client waits at least as long as the relay may take

The network to a rented runtime may be lost for a while, and that runtime waits for its whole lease before it
ends. So we wait as long (G5), and at least as long as a lost link may need to recover. A runtime on this
computer has no network before it, and gets that minimum. Neighbours: `run.py` hands it to `relay.py`,
`runtime_monitor.py` and `work.py`, `endpoint.py` to the program, where `client/wire.py` reads it. Knows
nothing of requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# The program's environment variable for it; the client has its own copy of the name.
VARIABLE = "LAUNCH_PATIENCE_SECONDS"
# Longer than a gateway that froze needs to be noticed and started again, and than it waits for an engine.
MIN_SECONDS = 180.0


def seconds(lease_seconds: float, rented: bool) -> float:
    """The timeout budget of a run with this lease."""
    return max(MIN_SECONDS, lease_seconds) if rented else MIN_SECONDS


def of_record(plan: Mapping[str, Any]) -> float:
    """The same, from the plan in a run's record."""
    return seconds(plan.get("lease_seconds") or 0.0, plan.get("rented") is not None)
