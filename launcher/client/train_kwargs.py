"""A program's `train_kwargs`, resolved by its run: sent as plain JSON, answered as settings of its steps.

Neighbours: the runtime's `shared/train_kwargs/` has the one table of keywords and answers; `dspy/grpo.py`
asks before it rolls anything out. Knows no keyword itself, except those that are secrets.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from enum import Enum
from pathlib import PurePath
from typing import Any, Literal

from pydantic import ValidationError

from launcher.client.connection import Connection
from launcher.client.failures import Refused, TrainingFailed
from launcher.client.launch_line import hint_of_fitting_run
from launcher.client.request_bodies import REQUEST_HEADER, RequestBody, ResponseBody, StepSettings
from launcher.client.wire import new_request_id

_PATH = "/slipway/train_kwargs"
# Their values are no business of the run's.
_SECRET = re.compile(r"(?i)(^|_)(token|password|secret|api_?key)$")
_REDACTED = "(not sent)"
# Of a LoRA configuration without a method that lists its fields.
_LORA_FIELDS = (
    "r",
    "lora_alpha",
    "target_modules",
    "lora_dropout",
    "bias",
    "use_rslora",
    "use_dora",
    "task_type",
)
_MAX_DEPTH = 8

# The trainer that the keywords are from.
Trainer = Literal["trl", "art"]
# The place where a program gives them.
_SOURCES: dict[Trainer, str] = {"trl": "train_kwargs", "art": "train()"}


class TrainKwargsRequest(RequestBody):
    """The request's body: the keywords to resolve, as in the runtime."""

    train_kwargs: dict[str, Any]
    strict: bool = False
    steps: int | None = None
    trainer: Trainer = "trl"


class Refusal(ResponseBody):
    """A keyword that this run cannot follow: why, and the options of `launch` with which one could."""

    key: str
    why: str
    launch: str = ""


class TrainKwargsResponse(ResponseBody):
    """The response's body: the meaning of the keywords on this run, as in the runtime."""

    settings: StepSettings = StepSettings()
    sampling: dict[str, Any] = {}
    notes: list[str] = []
    refusals: list[Refusal] = []


@dataclass(frozen=True)
class ResolvedTrainKwargs:
    """The step settings that differ from the run's, the sampling for them, and notes to log once."""

    settings: StepSettings | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def settings_at(self, step: int) -> StepSettings | None:
        """The settings of step `step`, from 0: a schedule counts from the first of these steps."""
        settings = self.settings
        if settings is None or (settings.schedule is None and settings.warmup_steps is None):
            return settings
        return settings.model_copy(update={"schedule_step": step})

    @property
    def temperature(self) -> float:
        """The temperature of rollouts."""
        return float(self.sampling.get("temperature", 1.0))

    @property
    def changed_settings(self) -> dict[str, Any]:
        """The settings that were given, as JSON."""
        return self.settings.model_dump(exclude_none=True) if self.settings is not None else {}


def resolve(
    connection: Connection,
    train_kwargs: Mapping[str, Any],
    steps: int | None = None,
    strict: bool = True,
    trainer: Trainer = "trl",
    source: str | None = None,
) -> ResolvedTrainKwargs:
    """Resolve them on this run; `steps`: their number. Without keywords no request is made. `source`: where
    the program gives them, if not in the usual place of this trainer's programs.

    Raises TypeError for a value that is no JSON, by its keyword, and TrainingFailed, with the `launch` line
    that would fit, for a keyword that the run cannot follow.
    """
    if not train_kwargs:
        return ResolvedTrainKwargs()
    request = TrainKwargsRequest(
        train_kwargs=to_json(train_kwargs), strict=strict, steps=steps, trainer=trainer
    )
    content = json.dumps(request.model_dump()).encode()
    headers = {REQUEST_HEADER: new_request_id(), "content-type": "application/json"}
    response = connection.wire.send("POST", _PATH, content, headers)
    try:
        answer = TrainKwargsResponse.model_validate_json(response.content if response.is_success else b"")
    except ValidationError:
        what = "The run does not say what train_kwargs mean"
        raise Refused(what, response.status_code, why=response.text[:300]) from None
    source = source or _SOURCES[trainer]
    if answer.refusals:
        raise _refusal_error(answer.refusals, source)
    settings = answer.settings if answer.settings != StepSettings() else None
    return ResolvedTrainKwargs(settings, answer.sampling, tuple(f"{source}: {note}" for note in answer.notes))


def _refusal_error(refusals: list[Refusal], source: str) -> TrainingFailed:
    options = " ".join(dict.fromkeys(it.launch for it in refusals if it.launch))
    fits = hint_of_fitting_run(options) if options else None
    take_out = [it.key for it in refusals if not it.launch]
    change = f"change {', '.join(take_out)} in {source}" if take_out else None
    return TrainingFailed(
        f"This run cannot train as {source} asks",
        why="; ".join(f"{it.key}: {it.why}" for it in refusals),
        hint="; ".join(it for it in (change, fits) if it),
    )


# ------------------------------------------------------------------ as plain JSON


def to_json(train_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords as JSON has them, LoRA configurations and numbers of NumPy too. Raises TypeError."""
    found = {}
    for name, value in train_kwargs.items():
        try:
            found[str(name)] = _to_json(str(name), value, _MAX_DEPTH)
        except TypeError as error:
            raise TypeError(f"train_kwargs: {name}: {error}") from None
    return found


def _to_json(name: str, value: Any, depth_left: int) -> Any:
    if depth_left == 0:
        raise TypeError("it is nested too deep")
    if isinstance(value, Enum):
        return _to_json(name, value.value, depth_left - 1)
    if isinstance(value, str):
        return _REDACTED if _SECRET.search(name) else str(value)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _to_json(str(key), its, depth_left - 1) for key, its in value.items()}
    if isinstance(value, Set):
        return sorted((_to_json(name, it, depth_left - 1) for it in value), key=str)
    if isinstance(value, (list, tuple)):
        return [_to_json(name, it, depth_left - 1) for it in value]
    return _to_json(name, _object_value(value), depth_left - 1)


def _object_value(value: Any) -> Any:
    """A library object as plain data. Raises TypeError for an unknown type."""
    if hasattr(value, "r") and hasattr(value, "lora_alpha"):
        fields = value.to_dict() if callable(getattr(value, "to_dict", None)) else None
        return fields or {key: getattr(value, key) for key in _LORA_FIELDS if hasattr(value, key)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {it.name: getattr(value, it.name) for it in dataclasses.fields(value)}
    library = type(value).__module__.partition(".")[0]
    if library == "numpy" and callable(as_list := getattr(value, "tolist", None)):
        return as_list()
    if library == "torch" and type(value).__name__ == "dtype":
        return str(value)
    raise TypeError(
        f"a {type(value).__name__} cannot be sent to the run; give numbers, texts, switches, lists or dicts"
    )
