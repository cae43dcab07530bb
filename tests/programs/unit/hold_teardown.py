"""Holds the right to end a run until its standard input ends: `hold_teardown.py FOLDER WHO DOING`."""

from __future__ import annotations

import sys
from pathlib import Path

from launcher.records import teardown_lock


def main(folder: Path, who: str, doing: str) -> None:
    with teardown_lock.exclusive(folder, who, print) as turn:
        turn.report(doing)
        print("held", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
