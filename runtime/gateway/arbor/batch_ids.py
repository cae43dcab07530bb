"""The ids that a client may send groups under: new ones at every turn, never one a second time.

An optimizer remembers the ids it has fulfilled for as long as it lives, longer than a gateway or a machine
may: one that comes again would never be fulfilled, and its client would wait for another for ever.
Neighbours: jobs.py lists them. Knows nothing of groups, jobs or disks.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection

# A life of the gateway counts below a random number of its own. What is made so is below 2**52: JSON's
# readers keep such an integer exact.
_COUNTED_BITS = 20
_RANDOM_BITS = 32


class BatchIds:
    """The ids of one life of the gateway."""

    def __init__(self) -> None:
        self._next = self._beginning()

    def listed(self, listed: list[int], fulfilled: Collection[int], count: int) -> list[int]:
        """What of `listed` is unfulfilled, and as many new ones as make `count` of it."""
        kept = [number for number in listed if number not in fulfilled]
        return kept + [self._new() for _ in range(count - len(kept))]

    def _new(self) -> int:
        number = self._next
        self._next = number + 1
        if self._next % 2**_COUNTED_BITS == 0:
            self._next = self._beginning()
        return number

    @staticmethod
    def _beginning() -> int:
        return secrets.randbits(_RANDOM_BITS) << _COUNTED_BITS
