"""Holds a run for a Python process that started it, and ends it when that process is gone, for any reason.

    python -P -m launcher.client.holder --pipe FD -- LAUNCH'S COMMAND LINE

It stands between the process and `launch`, in a session of its own, so that a Ctrl-C in a notebook ends
nothing. At the pipe's end, which a kill -9 brings as well, it signals `launch` to end the run in order. The
run's program is `python -m launcher.client.holder` without arguments: it waits for the end of its input,
which is the end of the holder, so that the run ends also if the holder itself is killed. Neighbours:
`started_run.py` starts it and reads the output of `launch`. Knows nothing of runs.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence

# The byte for an orderly end. The pipe's end without it means that the process is gone.
DONE = b"."
_LOOK_SECONDS = 0.25


def main(arguments: Sequence[str]) -> int:
    """Without arguments the run's program; else the holder, which exits as `launch` does."""
    if not arguments:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        return 0
    pipe, command = int(arguments[1]), list(arguments[3:])
    # Of the group that we began: a notebook's signals are not for us.
    launch = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        return _hold(launch, pipe)
    finally:
        if launch.poll() is None:
            launch.terminate()


def _hold(launch: subprocess.Popen[bytes], pipe: int) -> int:
    """Wait until `launch` has ended by itself, or until the pipe requests its end.

    The pipe's number is that of the process, where many files may be open: `select` takes none past 1,023.
    """
    poller = select.poll()
    poller.register(pipe, select.POLLIN)
    while launch.poll() is None:
        if not poller.poll(_LOOK_SECONDS * 1000):
            continue
        assert launch.stdin is not None  # a pipe, as asked for
        if os.read(pipe, 1) == DONE:
            with contextlib.suppress(OSError):
                launch.stdin.close()  # the run's program ends with it, and the run in order
        else:
            launch.send_signal(signal.SIGTERM)
        return _code(launch.wait())
    return _code(launch.returncode)


def _code(returncode: int) -> int:
    return returncode if returncode >= 0 else 128 - returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
