"""The table of every keyword of Arbor's, TRL's and DSPy's `train_kwargs`, and its meaning on this run.

A keyword is *applied* (a setting of every step), *sampling*, *checked* against the run, or *noted*: only a
keyword that changes nothing passes in silence. Neighbours: `mapped.py`, `validated.py` and `ignored.py` have
the meanings, `art.py` those of ART's own keywords; DSPy's client, Arbor's and ART's all use it. Knows nothing
of HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from runtime.shared.schema import StepSettings
from runtime.shared.step_settings import SettingsError, resolve
from runtime.shared.train_kwargs.art import ART
from runtime.shared.train_kwargs.bodies import Trainer, TrainKwargsResponse
from runtime.shared.train_kwargs.ignored import IGNORED
from runtime.shared.train_kwargs.mapped import MAPPED, resolve_combinations
from runtime.shared.train_kwargs.translation import (
    Handler,
    Keyword,
    RunContext,
    Translation,
    UnsupportedValueError,
    format_keyword,
    number,
)
from runtime.shared.train_kwargs.validated import VALIDATED

# Values that keep the policy's own distribution: samples of a narrower one would be trained wrongly (C9).
NEUTRAL: dict[str, tuple[float, ...]] = {
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
}
_MAX_TEMPERATURE = 2.0


def _temperature(reading: Translation, name: str, value: Any) -> None:
    found = number(value)
    if not 0 < found <= _MAX_TEMPERATURE:
        raise UnsupportedValueError(f"it must be above 0 and at most {_MAX_TEMPERATURE:g}, not {value}")
    reading.sampling[name] = found


def _neutral(reading: Translation, name: str, value: Any) -> None:
    if number(value) not in NEUTRAL[name]:
        raise UnsupportedValueError(
            f"{format_keyword(name, value)} samples from a different distribution than the policy's"
        )
    reading.sampling[name] = value


TABLE: dict[str, Keyword] = {
    "temperature": Keyword("sampling", _temperature),
    **{name: Keyword("sampling", _neutral) for name in NEUTRAL},
    **{name: Keyword("applied", act) for name, act in MAPPED.items()},
    **{name: Keyword("checked", act) for name, act in VALIDATED.items()},
    **{name: Keyword("noted", act) for name, act in IGNORED.items()},
}


TABLES: dict[Trainer, dict[str, Keyword]] = {"trl": TABLE, "art": ART}


def read(
    train_kwargs: Mapping[str, Any],
    run: RunContext,
    *,
    strict: bool = False,
    steps: int | None = None,
    trainer: Trainer = "trl",
) -> TrainKwargsResponse:
    """The meaning of these keywords on this run. `strict`, `steps` and `trainer`: see `TrainKwargsRequest`.

    Refused keywords are in the answer: nothing is raised.
    """
    table = TABLES[trainer]
    given = {name: value for name, value in train_kwargs.items() if value is not None}
    reading = Translation(run, given, strict, steps)
    for name, keyword in table.items():
        if name in given:
            _read(reading, name, keyword.handle)
    for name in given:
        if name not in table:
            _unknown(reading, name, get_close_matches(name, table, 1))
    resolve_combinations(reading)
    _check_together(reading)
    return TrainKwargsResponse(
        settings=StepSettings.model_validate(reading.settings),
        sampling=reading.sampling,
        notes=reading.notes,
        refusals=reading.refusals,
    )


def _read(reading: Translation, name: str, act: Handler) -> None:
    try:
        act(reading, name, reading.given[name])
    except UnsupportedValueError as unfit:
        reading.refuse(name, str(unfit), unfit.launch)


def _unknown(reading: Translation, name: str, close: list[str]) -> None:
    meant = f"; did you mean {close[0]}?" if close else ""
    if reading.strict:
        reading.refuse(name, f"it is unknown{meant}")
    else:
        reading.notes.append(f"{name}: not known here, and without effect{meant}")


def _check_together(reading: Translation) -> None:
    """The run's own rule decides which settings contradict, whichever source they have (C60)."""
    try:
        resolve(reading.run.config.train, StepSettings.model_validate(reading.settings), 1)
    except SettingsError as error:
        reading.refuse(reading.sources.get(error.key, error.key), str(error))
