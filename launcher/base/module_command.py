"""The command line that starts a module of this package in a new Python, safe from the user's files.

Neighbours: whoever starts one (guardian, minder, keeper, SkyPilot's calls, the client's `launch`). The user's
own program is never started so. Imports nothing of ours: the client imports it.
"""

from __future__ import annotations

import sys
from pathlib import Path


def module_command(name: str, python: Path | str | None = None) -> list[str]:
    """The beginning of its command line. `-P`: the folder it is started in is not on its path.

    `python`: by another interpreter than this process's.
    """
    return [str(python or sys.executable), "-P", "-m", name]
