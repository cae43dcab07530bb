"""The translation of one `train_kwargs`: its settings so far, and the parsing of values.

Neighbours: `mapped.py`, `validated.py` and `ignored.py` interpret a keyword and write the result here;
`table.py` goes through the keywords. Knows none of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import ValidationError

from runtime.shared.runtime_config import RuntimeConfig
from runtime.shared.train_kwargs.bodies import Refusal

_SHOWN = 60
# Keywords whose values must not be repeated.
_SECRET = ("token", "key", "secret", "password")


class UnsupportedValueError(ValueError):
    """A value that cannot be followed; `launch`: the options with which a run could."""

    def __init__(self, why: str, launch: str = "") -> None:
        super().__init__(why)
        self.launch = launch


@dataclass(frozen=True)
class RunContext:
    """The facts of the run that keywords are compared with. None: not known yet.

    `context_tokens`: the longest prompt and answer together; `layers`: the names of all layers that could
    have LoRA here.
    """

    config: RuntimeConfig
    context_tokens: int | None = None
    layers: tuple[str, ...] | None = None


@dataclass
class Translation:
    """`given` are the keywords with a value: None means not given, with any trainer."""

    run: RunContext
    given: dict[str, Any]
    strict: bool
    steps: int | None
    settings: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    # By setting, the keyword that it is from.
    sources: dict[str, str] = field(default_factory=dict)

    def apply(self, name: str, setting: str, value: Any) -> None:
        """Set it for each step. Two keywords for one setting must agree."""
        if setting in self.settings and self.settings[setting] != value:
            raise UnsupportedValueError(
                f"{self.sources[setting]} says {self.settings[setting]} of the same: give one"
            )
        self.settings[setting] = value
        self.sources[setting] = name

    def note(self, name: str, text: str) -> None:
        """Note the behaviour here."""
        self.notes.append(f"{format_keyword(name, self.given.get(name))}: {text}")

    def refuse(self, key: str, why: str, launch: str = "") -> None:
        """The run cannot follow it."""
        self.refusals.append(Refusal(key=key, why=why, launch=launch))


Handler = Callable[[Translation, str, Any], None]
Kind = Literal["applied", "sampling", "checked", "noted"]


@dataclass(frozen=True)
class Keyword:
    """A keyword's kind, and the handler of its value."""

    kind: Kind
    handle: Handler


def format_keyword(name: str, value: Any) -> str:
    """`bf16=True`, as its user wrote it; the name alone if the value is long or secret."""
    plain = isinstance(value, (bool, int, float, str)) and len(repr(value)) <= _SHOWN
    is_secret = isinstance(value, str) and any(word in name.lower() for word in _SECRET)
    return f"{name}={value!r}" if plain and not is_secret else name


def launch_option(config: RuntimeConfig, key: str, value: Any) -> str:
    """The option of `launch` with which the run would have this value; empty if no run can."""
    values = config.model_dump()
    place = values
    *rooms, last = key.split(".")
    for room in rooms:
        place = place[room]
    place[last] = value
    try:
        RuntimeConfig.model_validate(values)
    except ValidationError:
        return ""
    return f"--set {key}={_cli_value(value)}"


def _cli_value(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(value)
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


# ------------------------------------------------------------------ values


def number(value: Any) -> float:
    """A finite number. One in text is taken too: YAML reads 1e-6 as text."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise UnsupportedValueError(f"expected a number, not {value[:_SHOWN]!r}") from None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise UnsupportedValueError(f"expected a number, not {_type_name(value)}")
    return float(value)


def integer(value: Any, least: int = 0) -> int:
    """A whole number of at least `least`; 4.0 is one too."""
    found = number(value)
    if found != int(found) or found < least:
        raise UnsupportedValueError(f"expected a whole number of {least} or more, not {value}")
    return int(found)


def boolean(value: Any) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise UnsupportedValueError(f"expected True or False, not {_type_name(value)}")
    return value


def choice(value: Any, choices: Sequence[str]) -> str:
    """One of these texts."""
    if value not in choices:
        raise UnsupportedValueError(f"{_type_name(value)} is not known here; there is {', '.join(choices)}")
    return value


def _type_name(value: Any) -> str:
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)[:_SHOWN]
    return f"a {type(value).__name__}"
