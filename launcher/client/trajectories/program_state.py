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
    if session.unsaved_state is not None:
        return copy.deepcopy(session.unsaved_state)
    status = session.settle()
    session.known_place = None  # a lost machine may have taken steps with it
    saved(session, status.step, status.client_state)
    return status.client_state or {}


def saved(session: Session, step: int, state: Mapping[str, Any] | None) -> None:
    """This state is kept with this step, and nothing is to be kept besides.

    It may be one of before: what is known of the newest step stays.
    """
    session.unsaved_state = None
    if session.known_place is None or step >= session.known_place[0]:
        session.known_place = step, copy.deepcopy(dict(state or {}))


def next_of(session: Session, state: Mapping[str, Any]) -> tuple[dict[str, Any], int, int | None]:
    """The state to keep with the next step, the step before it, and the step that has led there, if one has.

    An earlier life of the program sent that one and was killed, and it was taken in after this life had read
    its place: it is the very step that is about to be sent, of other rollouts.
    """
    status = session.settle()
    now, known = status.client_state or {}, session.known_place
    if known is not None and status.step > known[0]:
        wanted = _merged(known[1] if session.unsaved_state is None else session.unsaved_state, state)
        if wanted == now != known[1]:
            return now, known[0], status.step
    kept = _merged(now if session.unsaved_state is None else session.unsaved_state, state)
    return kept, status.step, None


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
