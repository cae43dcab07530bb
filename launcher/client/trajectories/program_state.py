"""The program's own state (where in its data it is): it rides on the steps, and agrees with what is kept.

Neighbours: `by_trajectories.py` has these as a session's methods, `train_groups.py` sends the state. Knows
nothing of what is in it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from launcher.client.answers import check_size
from launcher.client.session import Session


def read(session: Session) -> dict[str, Any]:
    """See `Session.read_state`."""
    if session.unsaved_state is None:
        return session.settle().client_state or {}
    return copy.deepcopy(session.unsaved_state)


def merge(session: Session, state: Mapping[str, Any]) -> dict[str, Any]:
    """See `Session.merge_state`."""
    merged = _merged(read(session), state)
    overwrite(session, merged)
    return merged


def overwrite(session: Session, state: Mapping[str, Any]) -> None:
    """See `Session.overwrite_state`. Raises ValueError for what no step can carry."""
    check_size(dict(state))
    session.unsaved_state = copy.deepcopy(dict(state))


def _merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(old)
    for key, value in new.items():
        before = merged.get(key)
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            value = _merged(before, value)
        merged[key] = value
    return merged
