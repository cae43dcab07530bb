"""How long a step takes here: as in an earlier run of the model, else estimated from its size and the cores.

Neighbours: `plan_verb.py` shows it below the plan. Sends no request.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from launcher.base.cores import usable_cores
from launcher.base.home import Home
from launcher.base.units import format_duration
from launcher.models import model_config
from launcher.records.endpoint import RESULTS
from launcher.records.records import RecordStore
from launcher.results import run_history
from launcher.types.plan import Plan
from runtime.shared import model_shape

# With fewer steps the first one, which warms everything up, would decide.
_MIN_STEPS = 4
# The step that an estimate is for: answers, their tokens, and those of their prompts.
_ANSWERS, _ANSWER_TOKENS, _PROMPT_TOKENS = 64, 12, 140
# Sampling and training with publication and proof, of which SmolLM2-135M's step of that size took 18.5 s on
# two cores, and the smallest models' 1.5 s (tests/bench/RESULTS.md).
_LEAST_SECONDS = 1.5
_CORE_SECONDS_PER_WEIGHT_AND_TOKEN = 2.6e-11


@dataclass(frozen=True)
class StepTime:
    """The seconds of a step: the median of the steps of `run`, or estimated for `cores` if that is None."""

    seconds: float
    run: str | None
    cores: int


def step_time(plan: Plan) -> StepTime | None:
    """Of the newest run of the same model at the same place, else an estimate; None if neither can be had."""
    cores = usable_cores()
    store = RecordStore(Home.find())
    for record in reversed(store.list()):
        before = record.details.get("plan") or {}
        if (before.get("model"), before.get("where")) != (plan.model, plan.where):
            continue
        machine = Path(record.machine.get("state_dir", store.folder(record.id) / "machine"))
        times = run_history.step_times(store.folder(record.id) / RESULTS, machine)
        if len(times) >= _MIN_STEPS:
            between = [later - earlier for earlier, later in pairwise(times)]
            return StepTime(median(between), record.name or record.id, cores)
    return None if plan.own is not None else _estimate(plan.model, cores)


def _estimate(model: str, cores: int) -> StepTime | None:
    """None for a model whose shape is not known here."""
    found = model_config.find_config(model, os.environ, asks=False)
    shape = None if found is None else model_shape.shape(found.config)
    if shape is None:
        return None
    tokens = _ANSWERS * (_ANSWER_TOKENS + _PROMPT_TOKENS)
    seconds = _LEAST_SECONDS + _CORE_SECONDS_PER_WEIGHT_AND_TOKEN * shape.weights * tokens / cores
    return StepTime(seconds, None, cores)


def step_line(plan: Plan, found: StepTime | None) -> str:
    """That time as a line of the plan."""
    if found is None:
        return f"  a step  not known before a run of {plan.model} here"
    seconds = format_duration(found.seconds)
    if found.run is None:
        step = f"{_ANSWERS} answers of {_ANSWER_TOKENS} tokens to prompts of {_PROMPT_TOKENS}"
        return f"  a step  about {seconds} for {step}, estimated for {found.cores} cores; programs differ"
    return f"  a step  {seconds} in {found.run}, the last run of {plan.model} here; programs differ"
