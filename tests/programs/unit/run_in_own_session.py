"""Runs a command as its child, in a session of the child's own: `run_in_own_session.py COMMAND…`."""

from __future__ import annotations

import subprocess
import sys

if __name__ == "__main__":
    subprocess.run(sys.argv[1:], start_new_session=True)
