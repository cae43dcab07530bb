"""Says how many processes carry a variable with a value; who asks is none: `count_carriers.py NAME VALUE`."""

from __future__ import annotations

import sys

from launcher.base import process_inspection

if __name__ == "__main__":
    print(len(process_inspection.with_variable(*sys.argv[1:])))
