"""A launcher as far as the minder can see: starts a command, hears no Ctrl-C, ends with its exit code."""

from __future__ import annotations

import os
import signal
import sys

from launcher.teardown import minder

if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda *_: None)
    sys.exit(minder.start(sys.argv[1:], os.environ).wait())
