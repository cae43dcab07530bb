"""New processes of `multiprocessing` that have imported what this one has, without importing it again.

SkyPilot's API server gives each request to a worker that multiprocessing spawns, which imports SkyPilot anew:
3 s of a processor and 180 MB for each. Here multiprocessing's own fork server forks them, and it is a fork
itself, of a process that has imported everything. Neighbour: `sky_server.py` is that process. Knows nothing
of SkyPilot.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import traceback
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker, util

_STANDARD_STREAMS = (0, 1, 2)


def use_fork_server() -> None:
    """From here on new processes are forked from this process as it is now. It must have one thread, no open
    connection, and nothing in its memory that is good for one process only.

    Only on Linux: on macOS a fork without an exec is unsafe, and the workers are spawned there as before.
    """
    if sys.platform != "linux":
        return
    multiprocessing.set_start_method("forkserver", force=True)
    multiprocessing.set_forkserver_preload([])
    resource_tracker.ensure_running()
    spawn = util.spawnv_passfds
    util.spawnv_passfds = _fork
    try:
        forkserver.ensure_running()
    finally:
        util.spawnv_passfds = spawn


def _fork(_: object, args: Sequence[str], passed: Sequence[int]) -> int:
    """What multiprocessing would have a new Python run, in a fork of this one; the fork's process id.

    As there, those passed are open, the standard streams, and no other descriptor.
    """
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        _close_all_but(passed)
        exec(args[-1], {})  # noqa: S102 - `from multiprocessing.forkserver import main; main(…)`
    except SystemExit:
        code = 0  # nobody is left that it could fork for
    except Exception:  # noqa: BLE001 - it must not go on as the process it is a fork of
        traceback.print_exc()
    finally:
        os._exit(code)


def _close_all_but(descriptors: Sequence[int]) -> None:
    kept = {*_STANDARD_STREAMS, *descriptors}
    for descriptor in {int(name) for name in os.listdir("/proc/self/fd")} - kept:
        with contextlib.suppress(OSError):  # that of the listing
            os.close(descriptor)
