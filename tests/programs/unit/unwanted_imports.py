"""Imports modules, or runs `launch`, and fails with the names of what that should not have imported.

    unwanted_imports.py NAME,… import MODULE…
    unwanted_imports.py NAME,… launch WORD…

It imports nothing else itself.
"""

from __future__ import annotations

import importlib
import sys


def main(unwanted: str, how: str, *words: str) -> None:
    if how == "launch":
        from launcher.cli import main

        main.main(list(words))
    else:
        for module in words:
            importlib.import_module(module)
    found = sorted(set(unwanted.split(",")) & set(sys.modules))
    sys.exit(f"imported: {found}" if found else 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
