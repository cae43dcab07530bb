"""The quickstart with THREADS rollouts at once: `python quickstart_with_threads.py THREADS QUICKSTART …`.

The default is another one in older versions, and what steps take is compared (tests/bench/step_time.py).
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

from launcher import client


def main(threads: int, quickstart: str, options: list[str]) -> None:
    class WithThreads(client.GRPO):
        def __init__(self, metric: Any, **settings: Any) -> None:
            super().__init__(metric, num_threads=threads, **settings)

    client.GRPO = WithThreads  # that is the point
    sys.argv = [quickstart, *options]
    runpy.run_path(quickstart, run_name="__main__")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
