"""Counts how often a step ended the whole trainer, because a killed process reports nothing.

A step that raises has a reason and fails at once. A step that kills the process (Linux does so when memory is
full, or a kernel of the device faults) would be retried by the next process for ever.
Neighbours: the recipe. Knows nothing of the step itself.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from runtime.shared.json_files import read_json, write_json
from runtime.trainer.ranks import Ranks

MAX_CRASHES = 3


class TooManyCrashesError(Exception):
    """Each of `MAX_CRASHES` tries at this step ended the trainer."""


class CrashCounter:
    """One file, about the step that is being computed; the first process writes it."""

    def __init__(self, path: Path, ranks: Ranks) -> None:
        self._path = path
        self._ranks = ranks

    def begin(self, step: int) -> None:
        """Count a try. Raises TooManyCrashesError, in every process, when there were enough."""
        before = self._ranks.broadcast(self._count(step) if self._ranks.is_rank_zero else 0)
        if before >= MAX_CRASHES:
            raise TooManyCrashesError(
                f"the trainer was ended {before} times while it computed this step, without a message: most "
                f"likely it needs more memory than there is; a smaller train.pack_tokens needs less"
            )
        self._write({"step": step, "tries": before + 1})

    def reset(self) -> None:
        """From here on the step is not the cause of a crash."""
        self._write({"step": 0, "tries": 0})

    def on_sigterm(self) -> None:
        """SIGTERM: a process killed after it did not die of this step, unless the signal comes because
        another rank died.

        torchrun sends it to all remaining ranks when one was killed.
        """
        if self._ranks.size == 1:
            self.reset()

    def _count(self, step: int) -> int:
        try:
            saved = read_json(self._path) or {}
        except ValueError:
            return 0
        return int(saved["tries"]) if saved.get("step") == step else 0

    def _write(self, value: dict[str, int]) -> None:
        if self._ranks.is_rank_zero:
            with contextlib.suppress(OSError):  # a full disk: a missing count must not fail the step
                write_json(self._path, value)
