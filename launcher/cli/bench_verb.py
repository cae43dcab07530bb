"""Runs `launch bench`: checks the options, measures, saves and shows the result.

Neighbours: `bench_command.py` has the options, `bench/self_bench.py` measures.
"""

from __future__ import annotations

import json
from pathlib import Path

from launcher.base import atomic
from launcher.base.errors import EXIT_OK, UsageError
from launcher.base.home import Home
from launcher.bench import self_bench
from launcher.bench.workload import Workload
from launcher.console.output import Output


def bench(output: Output, against: str | None, steps: int, seeds: int, staleness: int | None) -> int:
    """Measure. The exit code tells whether it was measured, never how fast it was."""
    if against is not None:
        raise UsageError(
            "--against is no longer an option of launch bench",
            "the comparison with TRL's trainer is a program of the tests, in a checkout",
            "uv run python -m tests.bench.against_trl",
        )
    found = self_bench.run_self_bench(Workload(steps, seeds, staleness), output, Home.find())
    data = found.to_dict()
    atomic.write(Path(found.folder) / "bench.json", json.dumps(data, indent=1) + "\n")
    output.result(data, found.text())
    return EXIT_OK
