"""One run of a DSPy program on one example, as the endpoint is told of it: which predictor, which call.

Neighbours: `engine.py` asks for the tags of each request, `rollouts.py` opens a rollout around each run.
The rollout in force is a DSPy setting, not a context variable of our own: DSPy carries its settings into the
threads and tasks it starts, together with `caller_modules`, which says which predictor is calling.
Knows nothing of HTTP, metrics or training.
"""

from __future__ import annotations

import hashlib
import threading
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal

import dspy

from runtime.schema import CALL_HEADER, PREDICTOR_HEADER, PURPOSE_HEADER, ROLLOUT_HEADER

_SETTING = "slipway_rollout"

OTHER = "(other)"
"""The predictor of a call that none of the program's own predictors made: one built inside `forward`."""


@dataclass
class Rollout:
    """Tags and tally of one run of a program. Shared by the threads of that run."""

    id: str
    predictors: Predictors
    purpose: Literal["train", "eval"] = "train"
    # Takes the place of what the program or its LM asks for: training and evaluation sample alike everywhere.
    sampling: Mapping[str, Any] = field(default_factory=dict)
    seed: str | None = None
    calls: Counter[str] = field(default_factory=Counter)
    empty: set[tuple[str, int]] = field(default_factory=set)
    unparsed: set[tuple[str, int]] = field(default_factory=set)
    # Answers that ended at their length limit and not by themselves.
    cut_off: set[tuple[str, int]] = field(default_factory=set)
    lost: list[str] = field(default_factory=list)
    versions: set[int] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def next_call(self, predictor: str) -> Call:
        with self._lock:
            call = Call(self, predictor, self.calls[predictor])
            self.calls[predictor] += 1
        return call


@dataclass(frozen=True)
class Call:
    """One request of a rollout; `index` counts this predictor's requests from 0."""

    rollout: Rollout
    predictor: str
    index: int

    @property
    def headers(self) -> dict[str, str]:
        headers = {
            ROLLOUT_HEADER: self.rollout.id,
            PREDICTOR_HEADER: self.predictor,
            CALL_HEADER: str(self.index),
        }
        if self.rollout.purpose == "eval":
            headers[PURPOSE_HEADER] = "eval"
        return headers

    @property
    def sampling(self) -> dict[str, Any]:
        """What the rollout asks of the sampler; with a seed of this call's own (C44)."""
        sampling = dict(self.rollout.sampling)
        if self.rollout.seed is not None:
            sampling["seed"] = _number(f"{self.rollout.seed}/{self.predictor}/{self.index}")
        return sampling


class Predictors:
    """The names of a program's predictors, found by identity, so that two may share a Signature."""

    def __init__(self, program: dspy.Module | None = None) -> None:
        named = list(program.named_predictors()) if program is not None else []
        self._program = program  # keeps the ids below from being given to other objects
        self._by_id = {id(predictor): header_safe(name) for name, predictor in named}
        stages = Counter(predictor.stage for _, predictor in named)
        # BestOfN, Refine and others run a deep copy: other objects with the stage of the original.
        self._by_stage = {it.stage: header_safe(name) for name, it in named if stages[it.stage] == 1}

    def calling(self) -> str:
        """The name of the innermost predictor on DSPy's stack, or OTHER."""
        for module in reversed(dspy.settings.caller_modules or []):
            name = self._by_id.get(id(module)) or self._by_stage.get(getattr(module, "stage", ""))
            if name is not None:
                return name
        return OTHER


# The request last begun in this thread or task: a parse error that follows is about its answer.
_last_call: ContextVar[Call | None] = ContextVar("slipway_last_call", default=None)


def current_rollout() -> Rollout | None:
    """The rollout in force here, or None."""
    return dspy.settings.get(_SETTING)


def astray() -> bool:
    """Whether nobody said here if this is a rollout: in training, a thread the program started by itself."""
    return _SETTING not in dspy.settings


@contextmanager
def outside_rollouts() -> Iterator[None]:
    """What is asked within belongs to no rollout, and is meant not to: a metric that asks a judge."""
    with dspy.context(**{_SETTING: None}):
        yield


def begin_call() -> Call | None:
    """Count a request of the rollout in force; None outside any rollout."""
    rollout = current_rollout()
    call = rollout.next_call(rollout.predictors.calling()) if rollout is not None else None
    _last_call.set(call)
    return call


def last_call() -> Call | None:
    """The request last begun in this thread or task."""
    return _last_call.get()


@contextmanager
def rollout(
    program: dspy.Module | None = None,
    rollout_id: str | None = None,
    purpose: Literal["train", "eval"] = "train",
) -> Iterator[Rollout]:
    """Tag all that the policy is asked within the block as one rollout; reward it by its `id`.

    With `program`, each of its predictors is told apart by name. Threads that DSPy starts belong to the
    rollout; threads the program starts by itself do not, unless they run in a copy of the context.
    """
    it = Rollout(rollout_id or f"r-{uuid.uuid4().hex}", Predictors(program), purpose)
    with in_rollout(it):
        yield it


@contextmanager
def in_rollout(it: Rollout, **settings: Any) -> Iterator[None]:
    """Put a rollout in force, with other DSPy settings if need be."""
    with dspy.context(**{_SETTING: it}, **settings):
        yield


def header_safe(name: str) -> str:
    """A predictor's name as it travels in a header and in a group."""
    return name.encode("ascii", "backslashreplace").decode()


def _number(text: str) -> int:
    """31 bits that depend on the text alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]) >> 1
