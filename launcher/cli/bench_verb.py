"""`launch bench`: what was asked is checked, measured, kept as a file and shown.

Neighbours: `bench_command.py` has the options, `bench/self_bench.py` measures. Knows nothing of how.
"""

from __future__ import annotations

import json
from pathlib import Path

from launcher.base import atomic
from launcher.base.errors import EXIT_OK, UsageError
from launcher.base.home import Home
from launcher.bench import self_bench
from launcher.bench.shape import Shape
from launcher.console.output import Output


def bench(output: Output, against: str | None, steps: int, seeds: int, staleness: int | None) -> int:
    """Measure; the exit code says that it was measured, never how fast it was."""
    if against is not None:
        raise UsageError(
            "--against is no option of launch bench any more",
            "the comparison with TRL's trainer is a program of the tests, in a checkout",
            "uv run python -m tests.bench.compare_with_trl",
        )
    found = self_bench.run_self_bench(Shape(steps, seeds, staleness), output, Home.find())
    data = found.to_dict()
    atomic.write(Path(found.folder) / "bench.json", json.dumps(data, indent=1) + "\n")
    output.result(data, found.text())
    return EXIT_OK
