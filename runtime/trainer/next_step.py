"""Chooses the recorded step that the trainer takes next, the same one in every process.

Neighbours: the recipe asks after each step; the gateway writes `steps/` while a run lives, a replay finds all
of it there. Knows nothing of a step's content.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from runtime.shared.batch import step_folder
from runtime.trainer.ranks import Ranks

_POLL_SECONDS = 0.02
_NOTHING_MORE = 0
_NOTHING_YET = -1
# The other ranks wait in a collective, which gives up after minutes: they hear from the first this often.
_BROADCAST_SECONDS = 30.0


@dataclass(frozen=True)
class NextStep:
    """`follow`: wait for a step that is not there yet, until `stopping` returns true, and call `on_idle`
    meanwhile."""

    steps: Path
    ranks: Ranks
    follow: bool
    stopping: Callable[[], bool]
    on_idle: Callable[[], object] = lambda: None

    def after(self, last: int) -> int | None:
        """The number of the step after `last`; None when there is none, or when it is time to stop.

        The first rank decides, so that all take the same.
        """
        step = _NOTHING_YET
        while step == _NOTHING_YET:
            step = self.ranks.broadcast(self._poll(last) if self.ranks.is_rank_zero else _NOTHING_YET)
        return None if step == _NOTHING_MORE else step

    def _poll(self, last: int) -> int:
        step = last + 1
        until = time.monotonic() + _BROADCAST_SECONDS
        while not self.stopping():
            # A step that failed holds no version: the gateway goes on with the next number.
            folder = step_folder(self.steps, step)
            if (folder / "failed.json").exists():
                step += 1
            elif folder.exists():
                return step
            elif not self.follow:
                break
            elif time.monotonic() > until:
                return _NOTHING_YET
            else:
                self.on_idle()
                time.sleep(_POLL_SECONDS)
        return _NOTHING_MORE
