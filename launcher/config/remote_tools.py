"""Checks that this computer has the programs that reach a rented machine, and names the command to install
them.

Neighbours: `request_validation.py` asks before a run, `doctor.py` at any time. Knows nothing of machines.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence

from launcher.base.errors import PreflightError

# The programs that reach a rented machine, each with the package it comes in.
TOOLS = {"ssh": "openssh-client", "rsync": "rsync"}
_IN_BREW = {"ssh": "openssh", "rsync": "rsync"}


def check_tools(*tools: str) -> None:
    """The programs that a rented machine is reached with are on this computer: these, or all TOOLS."""
    if missing := missing_tools(*tools):
        raise PreflightError(
            f"launch reaches a rented machine with {' and '.join(tools or TOOLS)}",
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not on this computer",
            install_command(missing),
        )


def missing_tools(*tools: str) -> list[str]:
    """The programs of `tools`, or of all TOOLS, that are not on the PATH."""
    return [tool for tool in tools or TOOLS if shutil.which(tool) is None]


def install_command(tools: Sequence[str]) -> str:
    """A command to paste."""
    if sys.platform == "darwin":
        return f"brew install {' '.join(_IN_BREW[tool] for tool in tools)}"
    return f"apt-get install {' '.join(TOOLS[tool] for tool in tools)}"
