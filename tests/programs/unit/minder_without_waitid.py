"""The minder on a system whose Python has no os.waitid: its words are the minder's own."""

from __future__ import annotations

import os
import sys

from launcher.teardown import minder

if __name__ == "__main__":
    del os.waitid
    os._exit(minder.main(sys.argv[1:]))
