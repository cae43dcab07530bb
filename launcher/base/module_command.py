"""The command line that starts a module of this package in a new Python, safe from the user's files.

Neighbours: guardian, minder, keeper, SkyPilot's calls and the client's `launch` are started by it. The user's
own program never is. Imports nothing of ours, because the client imports it.
"""

from __future__ import annotations

import sys
from pathlib import Path


def module_command(name: str, python: Path | str | None = None) -> list[str]:
    """The beginning of the command line. `-P`: the working folder is not on the module path.

    `python`: another interpreter than this process's.
    """
    return [str(python or sys.executable), "-P", "-m", name]
