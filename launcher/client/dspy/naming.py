"""The name by which a program asks the very weights it was compiled to, whatever is trained after it (C55).

`policy@v12+3f2a9c1b4d5e`: a version by its number and by its weights, as a run that lost its machine gives
numbers out again. Neighbours: `grpo.py` names what it trained, `lm.py` what it caches, `engine.py` reads the
answer's version. Knows nothing of programs or of training.
"""

from __future__ import annotations

import re
from typing import Any, Protocol

from launcher.client.schema import CheckpointInfo
from launcher.client.session import Session

_NAMED = re.compile(r"@v(\d+)(?:\+[0-9a-f]+)?$")
# Of a hash, in a name.
_DIGITS = 12


class AsksPolicy(Protocol):
    """An LM of the policy, as those see it who name what it asks: `lm.py` has the class."""

    session: Session
    model: str
    stands_in: bool

    def name(self, model: str) -> None:
        """Ask this version from here on."""
        ...

    def copy(self) -> Any:
        """Another one over the same engine."""
        ...


def version_in(model: str) -> str | None:
    """The number in a version's own name; None in any other."""
    found = _NAMED.search(model)
    return found[1] if found else None


def keep(session: Session, version: int, weights: str | None = None) -> str:
    """Have a version kept (see `Session.pin`); the name that means it alone.

    `weights`: their hash, where it is known. Raises Refused where these weights are not kept any more.
    """
    plain = f"{session.model}@v{version}"
    if not version:
        return plain  # the model itself, which is always served
    return _in_full(plain, session.pin(_with(plain, weights)))


def name_of(session: Session, version: int) -> str:
    """The name that means what is served as this version now, kept or not."""
    return named(session, version, weights_of(session, version))


def named(session: Session, version: int, weights: str | None) -> str:
    """The name that means the version with these weights; None: whatever has its number."""
    return _with(f"{session.model}@v{version}", weights)


def weights_of(session: Session, version: int) -> str | None:
    """The hash of what is served as this version now; None where it is not kept, or the model itself."""
    kept = next((it for it in session.checkpoints() if it.version == version), None)
    return None if kept is None else kept.weights or None


def _in_full(plain: str, kept: CheckpointInfo) -> str:
    return _with(plain, kept.weights or None)


def _with(plain: str, weights: str | None) -> str:
    return plain if weights is None else f"{plain}+{weights[:_DIGITS]}"
