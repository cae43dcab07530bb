"""Starts a child that dies with this process, where loading a library after the fork is an error."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys

from launcher.base import processes


def refuse(*_words: object, **_options: object) -> object:
    raise OSError("a library was loaded in the child")


if __name__ == "__main__":
    ctypes.CDLL = refuse  # type: ignore[assignment]
    parent = os.getpid()
    child = subprocess.Popen(
        [sys.executable, "-c", "print('ended with its parent\\'s signal set')"],
        preexec_fn=lambda: processes.die_with_parent(signal.SIGKILL, parent),
    )
    sys.exit(child.wait())
