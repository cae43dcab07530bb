"""The components of a run that its end has to close, and the run that ends.

Neighbours: `run.py` fills these in as it lives, `ending.py` ends them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from launcher.records.lease import Limits
from launcher.records.records import RunRecord
from launcher.teardown.guardian import Guardian
from launcher.types.machine import Machine

if TYPE_CHECKING:
    from launcher.proxy.relay import Relay
    from launcher.results.background_copy import BackgroundCopy
    from launcher.results.trackio_process import TrackioProcess
    from launcher.run.runtime_monitor import RuntimeMonitor


@dataclass
class RunComponents:
    """The components of a run when its life is over; None for one that it never had.

    `served`: its runtime was started, and so may have results.
    """

    machine: Machine | None = None
    guardian: Guardian | None = None
    relay: Relay | None = None
    monitor: RuntimeMonitor | None = None
    background_copy: BackgroundCopy | None = None
    trackio: TrackioProcess | None = None
    served: bool = False


@dataclass(frozen=True)
class EndingRun:
    """The run that ends. `limits` are on the clock that counts sleep."""

    record: RunRecord
    label: str
    command: tuple[str, ...]
    lease_seconds: float
    limits: Limits
