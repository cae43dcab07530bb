"""Runs a program as `launch bench` runs its sides: `python bench_child.py FOLDER PROGRAM...`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from launcher.base.errors import JobFailed
from launcher.bench import child

if __name__ == "__main__":
    try:
        child.run(
            "the program",
            sys.argv[2:],
            folder=Path(sys.argv[1]),
            environ=os.environ,
            max_seconds=60.0,
            progress=print,
            at_our_end=signal.SIGTERM,
        )
    except KeyboardInterrupt:
        sys.exit(130)
    except JobFailed as error:
        sys.exit(f"{error.message} | {error.why}")
