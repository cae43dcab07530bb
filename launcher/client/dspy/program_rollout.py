"""One run of a DSPy program on one example: its tags, its calls of the policy, and the result of each.

Neighbours: `tagging.py` has the rollout in force, `engine.py` notes each answer, `rollouts.py` opens one
around each run. Knows nothing of HTTP, metrics or training.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from launcher.client.dspy.predictors import Predictors
from launcher.client.request_bodies import CALL_HEADER, PREDICTOR_HEADER, PURPOSE_HEADER, ROLLOUT_HEADER


class RolloutEnded(BaseException):
    """Raised if a program sends requests in a run that is over. No Exception: programs swallow those."""


@dataclass(frozen=True)
class AnswerRecord:
    """The record of one answer of the policy."""

    version: int | None
    empty: bool = False
    # It ended at its length limit and not by itself.
    cut_off: bool = False
    # None if the endpoint does not tell.
    tokens: int | None = None
    repeated: float = 0.0


@dataclass
class ProgramRollout:
    """Tags and tally of one run of a program. Shared by the threads of that run.

    Once it has ended nothing is added: a late answer belongs to no step, because its batch went on without
    it.
    """

    id: str
    predictors: Predictors
    purpose: Literal["train", "eval"] = "train"
    # Replaces the sampling settings of the program or its LM: training and evaluation sample alike
    # everywhere.
    sampling: Mapping[str, Any] = field(default_factory=dict)
    seed: str | None = None
    # The model before training is evaluated in the policy's place.
    uses_base: bool = False
    # The model used instead of the newest version, for a validation beside training; the base instead of any
    # version.
    model: str | None = None
    # Requests after which a program is taken to ask for ever.
    max_calls: int | None = None
    calls: Counter[str] = field(default_factory=Counter, init=False)
    answers: dict[tuple[str, int], AnswerRecord] = field(default_factory=dict, init=False)
    unparsed: set[tuple[str, int]] = field(default_factory=set, init=False)
    endpoint_errors: list[str] = field(default_factory=list, init=False)
    # Other models that failed in it, by name, each as often as it did; and why the first of them.
    external_failures: Counter[str] = field(default_factory=Counter, init=False)
    external_failure_reason: str | None = field(default=None, init=False)
    # The endpoint stayed away for as long as patience lasted.
    is_unreachable: bool = field(default=False, init=False)
    # The last error of an adapter's parse(): a program that lets it through has an answer that did not parse.
    parse_error: BaseException | None = field(default=None, init=False)
    # The program has ended and the metric is at work.
    is_in_metric: bool = field(default=False, init=False)
    _ended: bool = field(default=False, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def next_call(self, predictor: str) -> Call:
        """Count a request. Raises RolloutEnded when the rollout has ended, or has made all it may."""
        with self._lock:
            if self._ended:
                raise RolloutEnded("this rollout is over: its batch continued without it")
            if self.reached_call_limit:
                raise RolloutEnded(f"it called the policy more than {self.max_calls} times")
            call = Call(self, predictor, self.calls[predictor])
            self.calls[predictor] += 1
        return call

    def end(self) -> None:
        """From here on requests of the program fail, and late answers are not noted."""
        with self._lock:
            self._ended = True

    def note_answer(self, call: Call, answered: AnswerRecord) -> None:
        with self._lock:
            if not self._ended:
                self.answers[call.key] = answered

    def note_endpoint_error(self, reason: str, is_unreachable: bool = False) -> None:
        """Remember that an answer never came: the program may swallow the exception."""
        with self._lock:
            if not self._ended:
                self.endpoint_errors.append(reason)
                self.is_unreachable = self.is_unreachable or is_unreachable

    def note_external_failure(self, model: str, reason: str) -> None:
        """Remember that another model failed, or a judge: the program or the metric may swallow it."""
        with self._lock:
            if not self._ended:
                self.external_failures[model] += 1
                self.external_failure_reason = self.external_failure_reason or f"{model} failed: {reason}"

    def note_unparsed(self, call: Call) -> None:
        with self._lock:
            if not self._ended:
                self.unparsed.add(call.key)

    @property
    def reached_call_limit(self) -> bool:
        """Whether it has made all its allowed requests."""
        return self.max_calls is not None and self.calls.total() >= self.max_calls

    @property
    def versions(self) -> set[int]:
        """The policy versions that answered."""
        return {it.version for _, it in self._answers() if it.version is not None}

    def versions_of(self, predictors: Collection[str]) -> set[int]:
        """The policy versions that answered these predictors."""
        return set(self.answers_by_version(predictors))

    def answers_by_version(self, predictors: Collection[str]) -> Counter[int]:
        """How many answers these predictors had of each policy version."""
        found = (it.version for (predictor, _), it in self._answers() if predictor in predictors)
        return Counter(version for version in found if version is not None)

    @property
    def cut_off(self) -> set[tuple[str, int]]:
        """The calls whose answer ended at its length limit."""
        return {key for key, it in self._answers() if it.cut_off}

    @property
    def lengths(self) -> list[int]:
        """The tokens of each answer."""
        return [it.tokens for _, it in self._answers() if it.tokens is not None]

    @property
    def repeated(self) -> list[float]:
        """How much of each answer repeats itself."""
        return [it.repeated for _, it in self._answers()]

    def _answers(self) -> list[tuple[tuple[str, int], AnswerRecord]]:
        with self._lock:
            return list(self.answers.items())


@dataclass(frozen=True)
class Call:
    """One request of a rollout; `index` counts this predictor's requests from 0."""

    rollout: ProgramRollout
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
        """The sampling parameters of the rollout, with a seed of this call's own (C44)."""
        sampling = dict(self.rollout.sampling)
        if self.rollout.seed is not None:
            sampling["seed"] = _seed_of(f"{self.rollout.seed}/{self.predictor}/{self.index}")
        return sampling


def _seed_of(text: str) -> int:
    """31 bits that depend on the text alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]) >> 1
