"""The table: every keyword of Arbor's, TRL's and DSPy's `train_kwargs`, and what it is on this run.

A keyword is *applied* (a setting of every step), *sampling*, *checked* against the run, or *noted*: nothing
passes in silence but what changes nothing. Neighbours: `applied.py`, `checked.py` and `noted.py` have the
meanings, `art.py` those of ART's own keywords; DSPy's client, Arbor's and ART's all ask for a reading. Knows
nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from runtime.shared.schema import StepSettings
from runtime.shared.step_settings import SettingsError, resolve
from runtime.shared.train_kwargs.applied import APPLIED, settle_together
from runtime.shared.train_kwargs.art import ART
from runtime.shared.train_kwargs.bodies import Trainer, TrainKwargsRead
from runtime.shared.train_kwargs.checked import CHECKED
from runtime.shared.train_kwargs.noted import NOTED
from runtime.shared.train_kwargs.reading import Act, Keyword, Reading, Run, UnfitError, number, shown

# Values that leave the policy's own distribution: what narrows it would be trained wrongly (C9).
NEUTRAL: dict[str, tuple[float, ...]] = {
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
}
_HOTTEST = 2.0


def _temperature(reading: Reading, name: str, value: Any) -> None:
    found = number(value)
    if not 0 < found <= _HOTTEST:
        raise UnfitError(f"it must be above 0 and at most {_HOTTEST:g}, not {value}")
    reading.sampling[name] = found


def _neutral(reading: Reading, name: str, value: Any) -> None:
    if number(value) not in NEUTRAL[name]:
        raise UnfitError(f"{shown(name, value)} samples from a different distribution than the policy's")
    reading.sampling[name] = value


TABLE: dict[str, Keyword] = {
    "temperature": Keyword("sampling", _temperature),
    **{name: Keyword("sampling", _neutral) for name in NEUTRAL},
    **{name: Keyword("applied", act) for name, act in APPLIED.items()},
    **{name: Keyword("checked", act) for name, act in CHECKED.items()},
    **{name: Keyword("noted", act) for name, act in NOTED.items()},
}


TABLES: dict[Trainer, dict[str, Keyword]] = {"trl": TABLE, "art": ART}


def read(
    train_kwargs: Mapping[str, Any],
    run: Run,
    *,
    strict: bool = False,
    steps: int | None = None,
    trainer: Trainer = "trl",
) -> TrainKwargsRead:
    """What these keywords are on this run. `strict`, `steps` and `trainer`: see `TrainKwargs`.

    What is refused is in the answer: nothing is raised.
    """
    table = TABLES[trainer]
    given = {name: value for name, value in train_kwargs.items() if value is not None}
    reading = Reading(run, given, strict, steps)
    for name, keyword in table.items():
        if name in given:
            _read(reading, name, keyword.act)
    for name in given:
        if name not in table:
            _unknown(reading, name, get_close_matches(name, table, 1))
    settle_together(reading)
    _check_together(reading)
    return TrainKwargsRead(
        settings=StepSettings.model_validate(reading.settings),
        sampling=reading.sampling,
        notes=reading.notes,
        refusals=reading.refusals,
    )


def _read(reading: Reading, name: str, act: Act) -> None:
    try:
        act(reading, name, reading.given[name])
    except UnfitError as unfit:
        reading.refuse(name, str(unfit), unfit.launch)


def _unknown(reading: Reading, name: str, close: list[str]) -> None:
    meant = f"; did you mean {close[0]}?" if close else ""
    if reading.strict:
        reading.refuse(name, f"it is not known here{meant}")
    else:
        reading.notes.append(f"{name}: not known here, and without effect{meant}")


def _check_together(reading: Reading) -> None:
    """What contradicts what is the run's own rule, whoever says it (C60)."""
    try:
        resolve(reading.run.config.train, StepSettings.model_validate(reading.settings), 1)
    except SettingsError as error:
        reading.refuse(reading.sources.get(error.key, error.key), str(error))
