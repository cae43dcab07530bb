"""`launch` itself, its local machine running `small_runtime.py` in this environment: a run within a second.

    python -m tests.support.small_launch -- python -m tests.support.small_program

Everything of the launcher is the real one: command line, record, guardian, relay, minder, pull, down.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from launcher.backends import local_machine
from launcher.cli import main
from launcher.config import preflight
from launcher.types.machine import Progress, no_progress


class SmallMachine(local_machine.LocalMachine):
    """The local machine with nothing to install."""

    def push(self) -> None:
        super().push()
        shutil.copy(Path(__file__).with_name("small_runtime.py"), self._code / "runtime" / "__main__.py")

    def setup(self, progress: Progress = no_progress) -> None:
        self._python = Path(sys.executable)


if __name__ == "__main__":
    local_machine.LocalMachine = SmallMachine  # that is the point
    preflight.check_runtime_environment = lambda home, variant="cpu": None  # it needs none
    sys.exit(main.main())
