"""`launch` as it is shipped, but for its waits, which are short: `python launch_hasty.py WORDS…`.

A runtime that does not answer is waited for as long as the lease is, however short that is. `down` waits ten
seconds for the run's own `launch` to begin its end, and says each second what it waits for. Results that do
not come are tried for three seconds.
"""

from __future__ import annotations

import sys

from launcher.base import timeout_budget
from launcher.cli import teardown_verbs
from launcher.cli.main import main as launch
from launcher.teardown import take_down


def main(words: list[str]) -> int:
    timeout_budget.MIN_SECONDS = 0.0
    teardown_verbs._ORDERLY_SECONDS = 10.0
    teardown_verbs._PROGRESS_SECONDS = 1.0
    teardown_verbs._KEEPING_SECONDS = take_down.TRIES_SECONDS = 3.0
    return launch(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
