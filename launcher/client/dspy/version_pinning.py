"""Pins copies of a program that were made before a training to the version they used (C55).

DSPy keeps copies of the programs it compares: BetterTogether's candidates, an optimizer's best so far, a
user's `before = program.deepcopy()`. A copy that was scored with one version would answer with another once
the policy is trained. So a training begins with giving such copies the name of the present version. An LM
that the user made keeps meaning the newest. Neighbours: `lm.py` reports each copy of an LM, `provider.py`
those of plain LMs that have it (Arbor's, for one); `grpo.py` and the jobs of `provider.py` call it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import dspy

from launcher.client.dspy.engine import is_base_name
from launcher.client.dspy.lm_endpoint import targets_run
from launcher.client.dspy.version_names import VersionedLM, parse_version, pin_version, use_version
from launcher.client.failures import Refused
from launcher.client.session import Session

_lock = threading.Lock()
_copies: weakref.WeakSet[VersionedLM] = weakref.WeakSet()
_plain_copies: weakref.WeakSet[dspy.LM] = weakref.WeakSet()


def register_copy(lm: VersionedLM) -> None:
    """Remember that `lm` was copied from another with the program around it."""
    with _lock:
        _copies.add(lm)


def register_plain_copies(memo: Mapping[int, Any]) -> None:
    """The same for plain LMs, which have no hook of their own: those that a deep copy has made so far, by the
    memo that it hands to each part."""
    with _lock:
        _plain_copies.update(it for it in memo.values() if type(it) is dspy.LM)


def pin_copies(student: dspy.Module, session: Session) -> str | None:
    """Give the copies that mean the newest version the present one's name, except for those of `student`,
    which is trained further. Returns a note on it; None if there are none."""
    return pin_copies_except(_values_of_parts(student), session)


def pin_copies_except(lms: Iterable[Any], session: Session) -> str | None:
    """The same, but for these LMs."""
    trained = {id(lm) for lm in lms}
    with _lock:
        copies, plain = list(_copies), list(_plain_copies)
    present = [
        *(lm for lm in copies if id(lm) not in trained and _follows_newest(lm, session)),
        *(lm for lm in plain if id(lm) not in trained and _is_newest_by_name(lm, session)),
    ]
    if not present:
        return None
    try:
        name = pin_version(session, session.version)
    except Refused as error:
        return f"copies of the program made earlier now use the newest version: {error}"
    for lm in present:
        use_version(lm, name)
    return f"copies of the program made earlier keep using {name}"


def _follows_newest(lm: VersionedLM, session: Session) -> bool:
    same_run = lm.session.endpoint.root == session.endpoint.root
    return same_run and lm.model == session.model and not lm.is_fallback


def _is_newest_by_name(lm: dspy.LM, session: Session) -> bool:
    if not vars(lm):  # another thread is copying it now
        return False
    if parse_version(lm.model) is not None or is_base_name(lm.model):
        return False
    try:
        return targets_run(lm, session.connection)
    except ValueError:  # a model that the run does not have: its own request reports it
        return False


def _values_of_parts(student: dspy.Module) -> Iterator[Any]:
    """The values that a program's parts hold, by themselves or in a list, tuple or dictionary."""
    for _, part in student.named_sub_modules():
        for value in vars(part).values():
            yield from _contained_values(value)


def _contained_values(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple) else (value,)
