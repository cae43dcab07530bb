"""One run of a DSPy program on one example, as the endpoint is told of it: which predictor, which call.

Neighbours: `engine.py` asks for the tags of each request and notes each answer, `rollouts.py` opens a rollout
around each run, `parsing.py` says which answers did not parse.
The rollout in force is a DSPy setting, not a context variable of our own: DSPy carries its settings into the
threads and tasks it starts, together with `caller_modules`, which says which predictor is calling.
Knows nothing of HTTP, metrics or training.
"""

from __future__ import annotations

import hashlib
import threading
import uuid
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal

import dspy

from launcher.client.bodies import CALL_HEADER, PREDICTOR_HEADER, PURPOSE_HEADER, ROLLOUT_HEADER

_SETTING = "slipway_rollout"

OTHER = "(other)"
"""The predictor of a call that none of the program's own predictors made: one built inside `forward`."""


class RolloutOver(BaseException):
    """Raised where a program asks on in a run that is over. No Exception: programs swallow those."""


@dataclass(frozen=True)
class Answered:
    """What is kept of one answer of the policy."""

    version: int | None
    empty: bool = False
    # It ended at its length limit and not by itself.
    cut_off: bool = False
    # None where the endpoint does not say.
    tokens: int | None = None
    repeated: float = 0.0


@dataclass
class Rollout:
    """Tags and tally of one run of a program. Shared by the threads of that run.

    Once it has ended nothing is added: what answers late belongs to no step (its batch went on without it).
    """

    id: str
    predictors: Predictors
    purpose: Literal["train", "eval"] = "train"
    # Takes the place of what the program or its LM asks for: training and evaluation sample alike everywhere.
    sampling: Mapping[str, Any] = field(default_factory=dict)
    seed: str | None = None
    # The model before training is evaluated in the policy's place.
    of_base: bool = False
    # Asked in the place of the newest version, as what is scored beside training is one; the base, of any.
    model: str | None = None
    # Requests after which a program is taken to ask for ever.
    most_calls: int | None = None
    calls: Counter[str] = field(default_factory=Counter)
    answers: dict[tuple[str, int], Answered] = field(default_factory=dict)
    unparsed: set[tuple[str, int]] = field(default_factory=set)
    lost: list[str] = field(default_factory=list)
    # Other models that failed in it, by name, each as often as it did; and why the first of them.
    outside: Counter[str] = field(default_factory=Counter)
    outside_reason: str | None = None
    # The endpoint stayed away for as long as patience lasted.
    gone: bool = False
    # What an adapter's parse() raised last: a program that lets it through has an answer that did not parse.
    parse_error: BaseException | None = None
    # The program has ended and the metric is at work.
    judging: bool = False
    _ended: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def next_call(self, predictor: str) -> Call:
        """Count a request. Raises RolloutOver when the rollout has ended, or has made all it may."""
        with self._lock:
            if self._ended:
                raise RolloutOver("this rollout is over: its batch continued without it")
            if self.asked_too_often:
                raise RolloutOver(f"it called the policy more than {self.most_calls} times")
            call = Call(self, predictor, self.calls[predictor])
            self.calls[predictor] += 1
        return call

    def end(self) -> None:
        """From here on the program asks in vain, and what answers late is not noted."""
        with self._lock:
            self._ended = True

    def note_answer(self, call: Call, answered: Answered) -> None:
        with self._lock:
            if not self._ended:
                self.answers[call.key] = answered

    def note_lost(self, reason: str, gone: bool = False) -> None:
        """Remember that an answer never came: the program may swallow the exception."""
        with self._lock:
            if not self._ended:
                self.lost.append(reason)
                self.gone = self.gone or gone

    def note_outside(self, model: str, reason: str) -> None:
        """Remember that another model failed, or a judge: the program or the metric may swallow it."""
        with self._lock:
            if not self._ended:
                self.outside[model] += 1
                self.outside_reason = self.outside_reason or f"{model} failed: {reason}"

    def note_unparsed(self, call: Call) -> None:
        with self._lock:
            if not self._ended:
                self.unparsed.add(call.key)

    @property
    def asked_too_often(self) -> bool:
        """Whether it has made all the requests that it may."""
        return self.most_calls is not None and self.calls.total() >= self.most_calls

    @property
    def versions(self) -> set[int]:
        """The policy versions that answered."""
        return {it.version for _, it in self._answered() if it.version is not None}

    def versions_of(self, predictors: Collection[str]) -> set[int]:
        """The policy versions that answered these predictors."""
        return set(self.answered_by(predictors))

    def answered_by(self, predictors: Collection[str]) -> Counter[int]:
        """How many answers these predictors had of each policy version."""
        found = (it.version for (predictor, _), it in self._answered() if predictor in predictors)
        return Counter(version for version in found if version is not None)

    @property
    def cut_off(self) -> set[tuple[str, int]]:
        """The calls whose answer ended at its length limit."""
        return {key for key, it in self._answered() if it.cut_off}

    @property
    def lengths(self) -> list[int]:
        """The tokens of each answer."""
        return [it.tokens for _, it in self._answered() if it.tokens is not None]

    @property
    def repeated(self) -> list[float]:
        """How much of each answer repeats itself."""
        return [it.repeated for _, it in self._answered()]

    def _answered(self) -> list[tuple[tuple[str, int], Answered]]:
        with self._lock:
            return list(self.answers.items())


@dataclass(frozen=True)
class Call:
    """One request of a rollout; `index` counts this predictor's requests from 0."""

    rollout: Rollout
    predictor: str
    index: int

    @property
    def key(self) -> tuple[str, int]:
        return self.predictor, self.index

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
    """The names of a program's predictors, found by identity, so that two may share a Signature.

    `frozen`: those inside a part that another optimizer compiled. DSPy leaves such a part as it is, so they
    are told apart but not trained.
    """

    def __init__(self, program: dspy.Module | None = None) -> None:
        named = [(header_safe(name), it) for name, it in _predictors(program)]
        self._program = program  # keeps the ids below from being given to other objects
        self._by_id = {id(predictor): name for name, predictor in named}
        self.names = frozenset(name for name, _ in named)
        self.frozen = frozenset(header_safe(name) for name in frozen_predictors(program))
        stages = Counter(predictor.stage for _, predictor in named)
        # BestOfN, Refine and others run a deep copy: other objects with the stage of the original.
        self._by_stage = {it.stage: name for name, it in named if stages[it.stage] == 1}

    def calling(self) -> str:
        """The name of the innermost predictor on DSPy's stack, or OTHER."""
        for module in reversed(dspy.settings.caller_modules or []):
            name = self._by_id.get(id(module)) or self._by_stage.get(getattr(module, "stage", ""))
            if name is not None:
                return name
        return OTHER


def frozen_predictors(program: dspy.Module | None) -> dict[str, dspy.Predict]:
    """Predictors of parts of the program that are compiled already: DSPy does not list these."""
    if program is None:
        return {}
    listed = {id(it) for _, it in program.named_predictors()}
    parts = [it for _, it in program.named_sub_modules(dspy.Module) if it is not program]
    inside = {
        id(it)
        for part in parts
        if getattr(part, "_compiled", False)
        for _, it in part.named_sub_modules(dspy.Predict)
    }
    return {name: it for name, it in _predictors(program) if id(it) in inside - listed}


def _predictors(program: dspy.Module | None) -> list[tuple[str, dspy.Predict]]:
    """Every predictor by name: those DSPy lists, and those in frozen parts or nested containers."""
    if program is None:
        return []
    found: list[tuple[str, dspy.Predict]] = list(program.named_predictors())
    known = {id(it) for _, it in found}
    for name, it in program.named_sub_modules(dspy.Predict):
        if isinstance(it, dspy.Predict) and id(it) not in known:
            found.append((name.removeprefix("self."), it))
    return found


@dataclass
class Exchange:
    """One call of an LM and what it became: its requests in order, and how many answers an adapter parsed."""

    calls: list[Call] = field(default_factory=list)
    parsed: int = 0
    # An adapter's parse() may call another's: the outermost decides.
    depth: int = 0


_exchange: ContextVar[Exchange | None] = ContextVar("slipway_exchange", default=None)


def begin_exchange() -> None:
    """An LM was called, whichever: what is parsed from here on is its answer."""
    _exchange.set(Exchange())


def last_exchange() -> Exchange | None:
    """The LM call last begun in this thread or task."""
    return _exchange.get()


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
    """Count a request of the rollout in force; None outside any rollout. Raises RolloutOver."""
    rollout = current_rollout()
    if rollout is None:
        return None
    call = rollout.next_call(rollout.predictors.calling())
    exchange = last_exchange()
    if exchange is not None:
        exchange.calls.append(call)
    return call


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
