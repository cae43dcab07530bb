"""Owns a rig until it is killed, and says which processes are in it: `python own_a_rig.py FOLDER`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tests.cloud.rig import Rig


def main(folder: Path) -> None:
    with Rig(folder) as rig:
        print(*rig.processes(), flush=True)
        time.sleep(600)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
