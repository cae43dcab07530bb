"""SkyPilot's API server for one run, without the parts that only a long-lived server needs.

    python -m launcher.backends.skypilot.sky_server --host=127.0.0.1 --port=PORT

It leaves out the standing jobs: each is a process that imports SkyPilot (3 s of a processor, 180 MB) and then
looks after clusters, volumes, tokens and metrics. It also leaves out the check of every account's credentials
at its start, which a launch makes itself. A run asks the provider for the state of its cluster, and the
machine's timer is skylet's, on the machine. Neighbours: `sky_home.py` starts and ends it, `sky_calls.py` asks
it.
"""

from __future__ import annotations

import importlib
import runpy
import warnings

from runtime.shared import imports

_SERVER = "sky.server.server"


def main() -> None:
    """Stay until it is ended."""
    with imports.collecting_nothing():
        from sky.server import daemons, server

    daemons.INTERNAL_REQUEST_DAEMONS.clear()
    server.schedule_on_boot_check_async = _nothing
    # Its start is the body of a module that is run, which then serves the module as it was imported above.
    warnings.filterwarnings("ignore", f".*{_SERVER}.* found in sys.modules", RuntimeWarning)
    runpy.run_module(_SERVER, run_name="__main__")


async def _nothing() -> None:
    pass


if __name__ == "__mp_main__":  # one of its workers, which multiprocessing has import this first
    with imports.collecting_nothing():
        importlib.import_module("sky.server.requests.executor")
elif __name__ == "__main__":
    main()
