"""A process that takes its time to end: `count_terms.py FILE SECONDS`; each TERM is a line of FILE."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path


def main(file: Path, seconds: float) -> None:
    def count(number: int, frame: object) -> None:
        with file.open("a") as lines:
            lines.write("TERM\n")

    signal.signal(signal.SIGTERM, count)
    file.touch()
    while not file.read_text():
        time.sleep(0.02)
    ends_at = time.monotonic() + seconds
    while time.monotonic() < ends_at:
        time.sleep(0.02)


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
