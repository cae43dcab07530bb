"""Builds an environment and passes on what uv says: `build_environment.py ROOT REQUIREMENTS VARIANT`."""

from __future__ import annotations

import sys
from pathlib import Path

from runtime.bootstrap import ensure_environment


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    root, requirements, variant = sys.argv[1:]
    ensure_environment(Path(root), variant, requirements=Path(requirements), progress=say)
