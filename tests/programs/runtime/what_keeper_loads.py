"""Imports the keeper; prints which of the modules that are named as arguments came with it."""

from __future__ import annotations

import sys

import runtime.keeper  # noqa: F401 - for what it brings along

if __name__ == "__main__":
    print([name for name in sys.argv[1:] if name in sys.modules])
