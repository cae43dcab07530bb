"""`launch bench`: what was asked is checked, measured, kept as a file and shown.

Neighbours: `bench_command.py` has the options, `bench/alone.py` and `bench/against.py`
measure. Knows nothing of how.
"""

from __future__ import annotations

import json
from pathlib import Path

from launcher.base import atomic
from launcher.base.errors import EXIT_OK, UsageError
from launcher.base.home import Home
from launcher.bench import against as comparison
from launcher.bench import alone
from launcher.bench.shape import SEEDS, Shape
from launcher.screen.output import Output


def bench(output: Output, against: str | None, steps: int, seeds: int | None, staleness: int | None) -> int:
    """Measure; the exit code says that it was measured, never how fast it was."""
    if against is not None and against not in comparison.OPPONENTS:
        raise UsageError(
            f"there is no comparison with {against}",
            f"what can be compared with: {', '.join(comparison.OPPONENTS)}",
            "launch bench --against trl",
        )
    home = Home.find()
    if against is None:
        found = alone.alone(Shape(steps, seeds or 1, staleness), output, home)
    else:
        found = comparison.against_trl(Shape(steps, seeds or SEEDS, staleness), output, home)
    data = found.to_dict()
    atomic.write(Path(found.folder) / "bench.json", json.dumps(data, indent=1) + "\n")
    output.result(data, found.text())
    return EXIT_OK
