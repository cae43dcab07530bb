"""A pool of workers that are forked with what is set here: `fork_workers.py`; prints what they see, as JSON.

It ends when its input does.
"""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import forkserver

from launcher.backends.skypilot import forked_workers

# As a module that takes long to import is; a worker that imports this program anew does not see the change.
LOADED = {"here": False}


def seen() -> dict[str, object]:
    """What a worker has."""
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    files = [os.readlink(link) for link in links if os.path.lexists(link)]
    return {"loaded": LOADED["here"], "pid": os.getpid(), "files": files}


def main() -> None:
    LOADED["here"] = True
    with open(sys.argv[0]) as _:
        forked_workers.use_fork_server()
    pool = ProcessPoolExecutor(2)
    found = [pool.submit(seen).result() for _ in range(2)]
    server = forkserver._forkserver._forkserver_pid
    print(json.dumps({"workers": found, "server": server}), flush=True)
    sys.stdin.read()
    pool.shutdown()


if __name__ == "__main__":
    main()
