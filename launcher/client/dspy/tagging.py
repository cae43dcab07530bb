"""The rollout of a DSPy program that is in force here, and the call that a request belongs to.

Neighbours: `program_rollout.py` has a rollout and its calls; `engine.py` asks for each request, `rollouts.py`
puts one in force around each run, `parse_failures.py` finds the answers that did not parse. The rollout in
force is a DSPy setting, not a context variable of our own: DSPy carries its settings into the threads and
tasks it starts, together with `caller_modules`, which has the calling predictor. Knows nothing of HTTP,
metrics or training.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal

import dspy

from launcher.client.dspy.predictors import Predictors
from launcher.client.dspy.program_rollout import Call, ProgramRollout

_SETTING = "slipway_rollout"


@dataclass
class Exchange:
    """One call of an LM and its result: its requests in order, and how many answers an adapter parsed."""

    calls: list[Call] = field(default_factory=list)
    parsed: int = 0
    # An adapter's parse() may call another's: the outermost decides.
    depth: int = 0


_exchange: ContextVar[Exchange | None] = ContextVar("slipway_exchange", default=None)


def begin_exchange() -> None:
    """Any LM was called: the next parsed text is its answer."""
    _exchange.set(Exchange())


def last_exchange() -> Exchange | None:
    """The LM call last begun in this thread or task."""
    return _exchange.get()


def current_rollout() -> ProgramRollout | None:
    """The rollout in force here, or None."""
    return dspy.settings.get(_SETTING)


def is_untagged() -> bool:
    """Whether no rollout is known here: in training, this is a thread that the program started by itself."""
    return _SETTING not in dspy.settings


@contextmanager
def no_rollout() -> Iterator[None]:
    """Requests inside belong to no rollout, on purpose: a metric that asks a judge."""
    with dspy.context(**{_SETTING: None}):
        yield


def begin_call() -> Call | None:
    """Count a request of the rollout in force; None outside any rollout. Raises RolloutEnded."""
    rollout = current_rollout()
    if rollout is None:
        return None
    call = rollout.next_call(rollout.predictors.current_name())
    exchange = last_exchange()
    if exchange is not None:
        exchange.calls.append(call)
    return call


@contextmanager
def rollout(
    program: dspy.Module | None = None,
    rollout_id: str | None = None,
    purpose: Literal["train", "eval"] = "train",
) -> Iterator[ProgramRollout]:
    """Tag all requests to the policy within the block as one rollout; reward it by its `id`.

    With `program`, each of its predictors is told apart by name. Threads that DSPy starts belong to the
    rollout; threads the program starts by itself do not, unless they run in a copy of the context.
    """
    it = ProgramRollout(rollout_id or f"r-{uuid.uuid4().hex}", Predictors(program), purpose)
    with in_rollout(it):
        yield it


@contextmanager
def in_rollout(it: ProgramRollout, **settings: Any) -> Iterator[None]:
    """Put a rollout in force, with other DSPy settings if need be."""
    with dspy.context(**{_SETTING: it}, **settings):
        yield
