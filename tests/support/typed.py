"""What a user types, through the console script's own entry, in this process: no interpreter is started.

Some tests of the same start a process all the same (`tests/unit/test_cli.py`), so that nothing hangs on this.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
from pathlib import Path

import pytest

from launcher.cli.main import main


class Typed:
    """`typed("status", "--json")` in a home and a folder of its own; `stdout`, `stderr` and the exit code."""

    def __init__(self, folder: Path, home: Path) -> None:
        self.folder = folder
        self.home = home
        folder.mkdir(exist_ok=True)

    def __call__(self, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        stdout, stderr = io.StringIO(), io.StringIO()
        with pytest.MonkeyPatch.context() as patch:
            for name in [name for name in os.environ if name.startswith("LAUNCH_")]:
                patch.delenv(name)
            for name, value in {"LAUNCH_HOME": str(self.home), **environ}.items():
                patch.setenv(name, value)
            patch.chdir(self.folder)
            with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
                code = main(list(words))
        return subprocess.CompletedProcess(["launch", *words], code, stdout.getvalue(), stderr.getvalue())
