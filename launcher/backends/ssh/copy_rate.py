"""The bandwidth limit of copies during a run, so that its rollouts keep the connection.

Neighbours: `results_download.py` asks before each copy and reports its speed; `--copy-rate` sets a fixed
limit. By default the limit is half of the line's speed: after a copy that reached its limit the next may be
twice as fast; one that did not reach it was as fast as the line. Knows nothing of ssh.
"""

from __future__ import annotations

import time
from collections.abc import Callable

# Where nothing is known yet: 8 Mbit/s.
FIRST_BYTES_PER_SECOND = 1e6
# The share of the line that a copy may use.
SHARE = 0.5
# A copy this near to its rate has reached it.
_REACHED = 0.85
# A shorter copy does not measure a line.
_MIN_MEASURED_SECONDS = 3.0
# A laptop that has moved to a better line notices within this.
_REMEASURE_SECONDS = 600.0


class CopyRate:
    """`fixed`: bytes a second as the user set them, infinite for no limit; None to follow the line."""

    def __init__(self, fixed: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._fixed = fixed
        self._clock = clock
        self._rate = FIRST_BYTES_PER_SECOND
        # When the line was seen to be full; None before.
        self._full_at: float | None = None

    @property
    def rate(self) -> float | None:
        """The limit in bytes a second now; None for no limit."""
        if self._fixed is not None:
            return None if self._fixed == float("inf") else self._fixed
        return self._rate

    def learn(self, moved: int, seconds: float) -> None:
        """Adapt the limit: a copy under it moved so many bytes in so many seconds."""
        if self._fixed is not None or seconds < _MIN_MEASURED_SECONDS:
            return
        reached = moved / seconds
        now = self._clock()
        if reached < _REACHED * self._rate:
            self._rate = max(SHARE * reached, SHARE * FIRST_BYTES_PER_SECOND / 4)
            self._full_at = now
        elif self._full_at is None or now - self._full_at > _REMEASURE_SECONDS:
            self._rate *= 2
