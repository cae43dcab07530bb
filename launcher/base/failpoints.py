"""Named instants of the launcher's own processes at which a test may kill, break or freeze them.

    LAUNCH_FAILPOINT=cli.armed:kill9 launch …

The text's form is `runtime/shared/failpoints.py`'s; `NAMES` lists them all. Without the variable nothing
happens and nothing is imported. Neighbours: `run.py`, `relay.py`, `results_copy.py`, `durable.py` and
`backends/` pass them.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING

from launcher.base.errors import ConfigError

if TYPE_CHECKING:
    from runtime.shared.failpoints import Failpoints

VARIABLE = "LAUNCH_FAILPOINT"
NAMES = (
    "cli.recorded",  # the record is on disk, nothing else is
    "cli.guarded",  # the guardian watches
    "cli.armed",  # the machine's folders are made, a rewind is in place
    "cloud.launching",  # SkyPilot is up and is about to be asked for a machine
    "cloud.asked",  # it has been asked, nothing is known yet
    "cloud.launched",  # the machine is up and armed, our books do not have it
    "cloud.pushed",  # the runtime's code is there
    "cloud.seeding",  # a new machine has its checkpoints, not yet where its runtime looks for them
    "cloud.prepared",  # its environment is there as well
    "cloud.serving",  # its keeper was started, nothing has been heard of it
    "cloud.downing",  # SkyPilot is about to be called to end the cluster
    "cloud.downed",  # SkyPilot reports the end, the provider was not asked
    "cli.served",  # the runtime answers, no relay listens yet
    "cli.started",  # the user's program runs
    "cli.pulling",  # some of the results are home, some are not
    "cli.pulled",  # all are home, nothing is down
    "cli.downed",  # everything is down and proven, the record does not have it yet
    "durable.seeding",  # the same of a run on this computer, for which its folder is a new machine
    "relay.opened",  # the relay is open, the heartbeat has not begun
    "relay.read",  # a program's request is in our hands
    "relay.forwarded",  # the gateway begins to answer it
    "relay.answered",  # its answer is in our hands, the program has nothing of it
    "relay.replaying",  # the link was lost, the request is about to be asked again
    "relay.streaming",  # a part of a long answer has been passed on
)


def failpoint(name: str) -> None:
    """Act if this instant is armed. Raises ConfigError for a text that names none."""
    if os.environ.get(VARIABLE):
        _of_this_process().reached(name)


@functools.cache
def _of_this_process() -> Failpoints:
    from runtime.shared import failpoints

    try:
        return failpoints.Failpoints(os.environ[VARIABLE])
    except ValueError as error:
        raise ConfigError(f"{VARIABLE} cannot be read", str(error), f"unset {VARIABLE}") from None
