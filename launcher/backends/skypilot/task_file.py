"""The task files that SkyPilot is given: in the installed package, or in the checkout.

Neighbours: `provision.py` launches with one. Knows nothing of their content.
"""

from __future__ import annotations

from pathlib import Path


def task_file(name: str) -> Path:
    """A task file: in the installed package, or in the checkout."""
    package = Path(__file__).resolve().parents[2]
    installed = package / "sky" / name
    return installed if installed.exists() else package.parent / "sky" / name
