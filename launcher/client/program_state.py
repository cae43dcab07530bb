"""The program's own state (its place in its data): it rides on the steps, and agrees with the kept
checkpoint.

Neighbours: `session.py` has its methods, `trajectories/train_groups.py` sends the state, `steps.py` has its
step. Knows nothing of its content.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from launcher.client.answers import check_client_state
from launcher.client.steps import TrainingSteps


class ProgramState:
    """The state of one program on one run."""

    def __init__(self, steps: TrainingSteps) -> None:
        self._steps = steps
        # The state merged since the last step; it is kept with the next one.
        self.unsaved: dict[str, Any] | None = None
        # How often a step of this program was refused because the machine was lost.
        self.rewinds = 0
        # The newest committed step that this program knows of, and the state that is kept with it.
        self._known: tuple[int, dict[str, Any]] | None = None

    def read(self) -> dict[str, Any]:
        """See `Session.read_state`."""
        if self.unsaved is not None:
            return copy.deepcopy(self.unsaved)
        status = self._steps.settle()
        self._known = None  # a lost machine may have taken steps with it
        self.mark_saved(status.step, status.client_state)
        return status.client_state or {}

    def merge(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """See `Session.merge_state`."""
        merged = _merged(self.read(), state)
        self.overwrite(merged)
        return merged

    def overwrite(self, state: Mapping[str, Any]) -> None:
        """See `Session.overwrite_state`. Raises ValueError for a state that no step can carry."""
        check_client_state(dict(state))
        self.unsaved = copy.deepcopy(dict(state))

    def for_next_step(self, state: Mapping[str, Any]) -> tuple[dict[str, Any], int, int | None]:
        """The state for the next step, the step before it, and the step that has led there, if one has.

        An earlier life of the program sent that one and was killed, and it was taken in after this life had
        read its place: it is the very step that is about to be sent, of other rollouts.
        """
        status = self._steps.settle()
        now, known = status.client_state or {}, self._known
        if known is not None and status.step > known[0]:
            wanted = _merged(known[1] if self.unsaved is None else self.unsaved, state)
            if wanted == now != known[1]:
                return now, known[0], status.step
        kept = _merged(now if self.unsaved is None else self.unsaved, state)
        return kept, status.step, None

    def mark_saved(self, step: int, state: Mapping[str, Any] | None) -> None:
        """This state is kept with this step, and no other part is left to keep.

        The step may be an earlier one: the known state of the newest step stays.
        """
        self.unsaved = None
        if self._known is None or step >= self._known[0]:
            self._known = step, copy.deepcopy(dict(state or {}))

    def rewind(self) -> None:
        """The machine was lost: the state here belongs to lost rollouts, and the program goes back too."""
        self.unsaved = self._known = None
        self.rewinds += 1


def _merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(old)
    for key, value in new.items():
        before = merged.get(key)
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            value = _merged(before, value)
        merged[key] = value
    return merged
