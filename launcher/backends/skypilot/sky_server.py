"""SkyPilot's API server for one run, without the parts that only a long-lived server needs.

    python -m launcher.backends.skypilot.sky_server --host=127.0.0.1 --port=PORT

Left out are its standing jobs, a process each that imports SkyPilot (3 s of a processor, 180 MB) and then
looks after clusters, volumes, tokens and metrics; and the look at every account's credentials at its start,
which a launch takes itself. What a run's cluster does is asked of its provider, and its timer is skylet's, on
the machine. Neighbours: `sky_home.py` starts and ends it, `sky_calls.py` asks it.
"""

from __future__ import annotations

import runpy
import warnings

_SERVER = "sky.server.server"


def main() -> None:
    """Stay until it is ended."""
    from sky.server import daemons, server

    daemons.INTERNAL_REQUEST_DAEMONS.clear()
    server.schedule_on_boot_check_async = _nothing
    # Its start is the body of a module that is run, which then serves the module as it was imported above.
    warnings.filterwarnings("ignore", f".*{_SERVER}.* found in sys.modules", RuntimeWarning)
    runpy.run_module(_SERVER, run_name="__main__")


async def _nothing() -> None:
    pass


if __name__ == "__main__":
    main()
