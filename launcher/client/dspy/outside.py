"""Which other models failed in a run: a part of the program that asks one, or a judge in the metric, by name.

Neighbours: `rollouts.py` puts the watch among DSPy's callbacks, `program_rollout.py` keeps what it finds.
What such a model fails at says nothing about the policy, also where the program or the metric swallows the
exception. A predictor is judged by how it ends: an adapter may try again within it. Knows nothing of rewards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import dspy
from dspy.utils.callback import BaseCallback
from dspy.utils.exceptions import AdapterParseError, ContextWindowExceededError, LMError

from launcher.client.dspy.addressed import WAY_OUT, is_astray
from launcher.client.dspy.engine import BASE_MODEL
from launcher.client.dspy.lm import PolicyLM
from launcher.client.dspy.program_rollout import ProgramRollout
from launcher.client.dspy.standing_in import is_stand_in
from launcher.client.dspy.tagging import current_rollout, outside_rollouts

_JUDGED = "slipway_judged"


class OutsideWatch(BaseCallback):
    """One for all threads: what is under way is kept under the id of the call."""

    def __init__(self) -> None:
        self._under_way: dict[str, tuple[ProgramRollout, Any]] = {}

    def on_module_start(self, call_id: str, instance: Any, inputs: dict[str, Any]) -> None:
        if isinstance(instance, dspy.Predict):
            self._begin(call_id, instance.lm or dspy.settings.lm)

    def on_module_end(
        self, call_id: str, outputs: Any | None, exception: BaseException | None = None
    ) -> None:
        self._end(call_id, exception)

    def on_lm_start(self, call_id: str, instance: Any, inputs: dict[str, Any]) -> None:
        if not isinstance(_innermost(), dspy.Predict):  # a predictor says itself how it ended
            self._begin(call_id, instance)

    def on_lm_end(
        self, call_id: str, outputs: dict[str, Any] | None, exception: BaseException | None = None
    ) -> None:
        self._end(call_id, exception)

    def _begin(self, call_id: str, lm: Any) -> None:
        judged = dspy.settings.get(_JUDGED)
        rollout = judged or current_rollout()
        if rollout is not None and (judged is not None or _is_outside(lm, rollout)):
            self._under_way[call_id] = rollout, lm

    def _end(self, call_id: str, exception: BaseException | None) -> None:
        rollout, lm = self._under_way.pop(call_id, (None, None))
        if rollout is None or isinstance(exception, ContextWindowExceededError):
            return
        name = str(getattr(lm, "model", lm))
        if isinstance(exception, AdapterParseError):
            rollout.note_outside(name, "its answer could not be parsed")
        elif isinstance(exception, LMError):
            # The way out first: the run's own words may be cut off.
            out = f"{WAY_OUT}. " if is_astray(lm) and _is_unknown_model(exception) else ""
            rollout.note_outside(name, f"{out}{type(exception).__name__}: {exception}")


OUTSIDE = OutsideWatch()


@contextmanager
def judging(rollout: ProgramRollout) -> Iterator[None]:
    """The metric is at work on this run: what it asks is no part of it, what it is failed by is noted."""
    rollout.judging = True
    settings: dict[str, Any] = {_JUDGED: rollout, "callbacks": [*(dspy.settings.callbacks or []), OUTSIDE]}
    if is_stand_in(dspy.settings.lm):
        settings["lm"] = None  # the policy is nobody's judge unless somebody says so
    with outside_rollouts(), dspy.context(**settings):
        yield


def _is_outside(lm: Any, rollout: ProgramRollout) -> bool:
    if isinstance(lm, PolicyLM):
        return lm.model == BASE_MODEL and not rollout.of_base
    return lm is not None


def _is_unknown_model(error: LMError) -> bool:
    return error.status == 404


def _innermost() -> Any:
    modules = dspy.settings.caller_modules
    return modules[-1] if modules else None
