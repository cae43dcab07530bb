#!/usr/bin/env python3
"""The real rsync, but for its -e: that is split at blanks, quoted or not, as the rsync of macOS does it."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":
    words = sys.argv[1:]
    if "-e" in words:
        at = words.index("-e") + 1
        shell = Path(tempfile.mkdtemp()) / "shell"
        shell.write_text(f'#!/bin/sh\nexec {shlex.join(words[at].split())} "$@"\n')
        shell.chmod(0o700)
        words[at] = str(shell)
    own = Path(sys.argv[0]).parent
    path = os.pathsep.join(place for place in os.environ["PATH"].split(os.pathsep) if Path(place) != own)
    os.execv(str(shutil.which("rsync", path=path)), ["rsync", *words])
