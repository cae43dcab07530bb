"""The name by which a program uses the very weights it was compiled to, whatever is trained after it (C55).

`policy@v12+3f2a9c1b4d5e`: a version by its number and by its weights, as a run that lost its machine gives
numbers out again. Neighbours: `grpo.py` names its trained version, `lm.py` its cached one, `engine.py` reads
the answer's version. Knows nothing of programs or of training.
"""

from __future__ import annotations

import re
from typing import Any, Protocol

from launcher.client.schema import CheckpointInfo
from launcher.client.session import Session

_NAMED = re.compile(r"@v(\d+)(?:\+[0-9a-f]+)?$")
# LiteLLM's, in a plain LM's name of a model.
_PROVIDER = "openai/"
# Of a hash, in a name.
_DIGITS = 12


class VersionedLM(Protocol):
    """The protocol of a policy LM for code that sets the version it names; the class is in `lm.py`."""

    session: Session
    model: str
    is_fallback: bool

    def use_version(self, model: str) -> None:
        """Ask this version from here on."""
        ...

    def copy(self) -> Any:
        """Another one over the same engine."""
        ...


def parse_version(model: str) -> str | None:
    """The number in a version's own name; None in any other."""
    found = _NAMED.search(model)
    return found[1] if found else None


def with_provider_prefix(name: str, model: str) -> str:
    """A version's name as a plain LM has to spell it, whose own name is `model`: LiteLLM's prefix goes on."""
    return f"{_PROVIDER}{name}" if model.startswith(_PROVIDER) else name  # and after it perhaps a hub's name


def use_version(lm: Any, name: str) -> None:
    """Have an LM, the policy's own or a plain one of its run, ask this version from here on."""
    if hasattr(lm, "use_version"):
        lm.use_version(name)
    else:
        lm.model = with_provider_prefix(name, lm.model)


def pin_version(session: Session, version: int, weights: str | None = None) -> str:
    """Have a version kept (see `Session.pin`); the name that means it alone.

    `weights`: their hash, where it is known. Raises Refused if these weights are not kept any more.
    """
    plain = f"{session.model}@v{version}"
    if not version:
        return plain  # the model itself, which is always served
    return _name_of_checkpoint(plain, session.pin(_with_weights(plain, weights)))


def served_version_name(session: Session, version: int) -> str:
    """The name of the weights that are served as this version now, pinned or not."""
    return version_name(session, version, weights_hash(session, version))


def version_name(session: Session, version: int, weights: str | None) -> str:
    """The name of the version with these weights; without `weights`, of any version with this number."""
    return _with_weights(f"{session.model}@v{version}", weights)


def weights_hash(session: Session, version: int) -> str | None:
    """The hash of the weights served as this version; None if they are not kept, or for version 0."""
    kept = next((it for it in session.checkpoints() if it.version == version), None)
    return None if kept is None else kept.weights or None


def _name_of_checkpoint(plain: str, kept: CheckpointInfo) -> str:
    return _with_weights(plain, kept.weights or None)


def _with_weights(plain: str, weights: str | None) -> str:
    return plain if weights is None else f"{plain}+{weights[:_DIGITS]}"
