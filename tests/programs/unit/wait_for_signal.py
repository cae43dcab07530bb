"""Waits, and has its own way with a signal: `wait_for_signal.py READY [NAME [CODE [SAVED]]]`.

The file READY has its pid once it waits. At the signal NAME it writes the file SAVED and ends with CODE;
without a CODE it does not hear it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path


def main(ready: str, name: str = "", code: str = "", saved: str = "") -> None:
    def end(number: int, frame: object) -> None:
        if saved:
            Path(saved).write_text("in order")
        sys.exit(int(code))

    if name:
        signal.signal(signal.Signals[f"SIG{name}"], end if code else signal.SIG_IGN)
    Path(ready).write_text(str(os.getpid()))
    time.sleep(600)


if __name__ == "__main__":
    main(*sys.argv[1:])
