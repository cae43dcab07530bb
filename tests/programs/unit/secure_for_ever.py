"""Commits one step after the other and makes each durable: `secure_for_ever.py STATE_DIR RESULTS STEP`."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from launcher.results import results_copy
from tests.support.committed import commit


def main(state_dir: Path, results: Path, first_step: int) -> None:
    print("ready", flush=True)
    results_copy.make_durable(state_dir, results)  # what the life before this one had committed
    for step in itertools.count(first_step):
        commit(state_dir, step)
        results_copy.make_durable(state_dir, results)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
