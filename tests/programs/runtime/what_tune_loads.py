"""Runs `tune` with this program's arguments; prints its exit code, then which slow libraries are loaded."""

from __future__ import annotations

import sys

from runtime.recipes import tune

SLOW = {"torchtune", "datasets", "pandas", "pyarrow", "kagglehub", "torchao", "transformers"}

if __name__ == "__main__":
    try:
        tune.main()
    except SystemExit as ended:
        print(ended.code)
    print(sorted(name for name in SLOW if sys.modules.get(name)))
