"""Has its run catch up once that has said that it fell behind, and ends once the run has said so as well.

    catch_up.py CAUGHT_UP

The file CAUGHT_UP is the machine's cue. What is said once has a while each time in which to be said again.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from tests.support.waiting import wait_until

AGAIN_SECONDS = 0.5


def main(log: Path, caught_up: Path) -> None:
    wait_until(lambda: "copying checkpoints falls behind" in log.read_text(), what="it fell behind")
    time.sleep(AGAIN_SECONDS)
    caught_up.touch()
    wait_until(lambda: "copying caught up" in log.read_text(), what="it caught up")
    time.sleep(AGAIN_SECONDS)


if __name__ == "__main__":
    main(Path(os.environ["LAUNCH_RUN_DIR"]).with_name("launch.log"), Path(sys.argv[1]))
