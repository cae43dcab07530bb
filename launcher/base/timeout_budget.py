"""The timeout budget of a run: how long everything waits for a runtime that does not answer.

    relay      asks again for so long after a request's first loss, then answers 503
    run        ends when the runtime has said nothing for so long: at the first beat, and while it works
    program    finds it in its environment; our client waits at least as long as the relay may take

A rented runtime is behind a network that may be lost for a while, and waits for us for its lease before it
ends: it is waited for as long (G5), and never less than one that mends itself may need. One on this computer
is behind nothing, and is waited for just that long.
Neighbours: `run.py` hands it to `relay.py`, `runtime_monitor.py` and `work.py`, `endpoint.py` to the program,
where `client/wire.py` reads it. Knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# What the program finds it in; the client has its own copy of the name.
VARIABLE = "LAUNCH_PATIENCE_SECONDS"
# Longer than a gateway that froze needs to be noticed and started again, and than it waits for an engine.
MIN_SECONDS = 180.0


def seconds(lease_seconds: float, rented: bool) -> float:
    """The patience of a run with this lease."""
    return max(MIN_SECONDS, lease_seconds) if rented else MIN_SECONDS


def of_record(plan: Mapping[str, Any]) -> float:
    """The same from the plan that is in a run's record."""
    return seconds(plan.get("lease_seconds") or 0.0, plan.get("rented") is not None)
