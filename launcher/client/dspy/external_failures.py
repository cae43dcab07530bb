"""Failures of other models in a run, by name: of an LM that the program asks, or of a judge in the metric.

Neighbours: `rollouts.py` puts the watch among DSPy's callbacks, `program_rollout.py` keeps its finds. Such a
failure tells nothing about the policy, also if the program or the metric swallows the exception. A predictor
is judged by how it ends: an adapter may try again within it. Knows nothing of rewards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import dspy
from dspy.utils.callback import BaseCallback
from dspy.utils.exceptions import AdapterParseError, ContextWindowExceededError, LMError

from launcher.client.dspy.default_lm_fallback import is_fallback_lm
from launcher.client.dspy.engine import BASE_MODEL
from launcher.client.dspy.lm import PolicyLM
from launcher.client.dspy.lm_endpoint import SET_API_BASE_HINT, targets_run_by_environment
from launcher.client.dspy.program_rollout import ProgramRollout
from launcher.client.dspy.tagging import current_rollout, no_rollout

_METRIC_ROLLOUT = "slipway_judged"


class ExternalFailureCallback(BaseCallback):
    """One for all threads: calls in progress are kept under the id of the call."""

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
        if not isinstance(_innermost_module(), dspy.Predict):  # a predictor reports its own end
            self._begin(call_id, instance)

    def on_lm_end(
        self, call_id: str, outputs: dict[str, Any] | None, exception: BaseException | None = None
    ) -> None:
        self._end(call_id, exception)

    def _begin(self, call_id: str, lm: Any) -> None:
        judged = dspy.settings.get(_METRIC_ROLLOUT)
        rollout = judged or current_rollout()
        if rollout is not None and (judged is not None or _is_external(lm, rollout)):
            self._under_way[call_id] = rollout, lm

    def _end(self, call_id: str, exception: BaseException | None) -> None:
        rollout, lm = self._under_way.pop(call_id, (None, None))
        if rollout is None or isinstance(exception, ContextWindowExceededError):
            return
        name = str(getattr(lm, "model", lm))
        if isinstance(exception, AdapterParseError):
            rollout.note_external_failure(name, "its answer could not be parsed")
        elif isinstance(exception, LMError):
            # The way out first: the run's own words may be cut off.
            is_stray = targets_run_by_environment(lm) and _is_unknown_model(exception)
            out = f"{SET_API_BASE_HINT}. " if is_stray else ""
            rollout.note_external_failure(name, f"{out}{type(exception).__name__}: {exception}")


EXTERNAL_FAILURES = ExternalFailureCallback()


@contextmanager
def in_metric(rollout: ProgramRollout) -> Iterator[None]:
    """The metric runs on this rollout: its requests are no part of it, and a judge's failures are noted."""
    rollout.is_in_metric = True
    settings: dict[str, Any] = {
        _METRIC_ROLLOUT: rollout,
        "callbacks": [*(dspy.settings.callbacks or []), EXTERNAL_FAILURES],
    }
    if is_fallback_lm(dspy.settings.lm):
        settings["lm"] = None  # the policy is no judge unless the user configures it
    with no_rollout(), dspy.context(**settings):
        yield


def _is_external(lm: Any, rollout: ProgramRollout) -> bool:
    if isinstance(lm, PolicyLM):
        return lm.model == BASE_MODEL and not rollout.uses_base
    return lm is not None


def _is_unknown_model(error: LMError) -> bool:
    return error.status == 404


def _innermost_module() -> Any:
    modules = dspy.settings.caller_modules
    return modules[-1] if modules else None
