"""Runs a command under its minder, its output kept: `keep_output.py LOG COMMAND…`; ends as it did."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from launcher.teardown import minder

if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda number, frame: None)
    command = minder.start(sys.argv[2:], os.environ, Path.cwd(), 0.5, Path(sys.argv[1]))
    while (code := command.wait(0.1)) is None:
        pass
    sys.exit(code)
