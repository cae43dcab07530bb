"""Running a program on examples, many at a time: each run ends with its score or the reason for none.

Neighbours: `scoring.py` judges, `tagging.py` tags, `grouping.py` turns what is finished into groups.
`training.py` and `validation.py` ask for runs: one code, so that what they find can be compared.
Knows nothing of steps, the wire or what a reward is used for.
"""

from __future__ import annotations

import contextvars
import logging
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import dspy
from dspy.utils.callback import BaseCallback
from dspy.utils.exceptions import AdapterParseError, ContextWindowExceededError, LMError

from launcher.client.scoring import Metric, Score, Unscored
from launcher.client.tagging import Rollout, in_rollout, last_call, outside_rollouts

Outcome = Literal["scored", "unscored", "unparsed", "crashed", "lost", "overdue"]
"""How a run ended: with a score; without one; with an answer that did not parse; with the program's own
exception; without an answer from the endpoint; not within its time."""


@dataclass(frozen=True)
class Run:
    """One run to make: the example, its place in the batch, and the rollout it is."""

    example: dspy.Example
    index: int
    rollout: Rollout


@dataclass(frozen=True)
class Finished:
    """One run made. `score` stands for outcome "scored" alone; `reason` for all others."""

    run: Run
    outcome: Outcome
    score: Score | None = None
    reason: str | None = None
    prediction: Any = None

    @property
    def parsed(self) -> bool:
        """Whether every answer of the policy in this run parsed."""
        return not self.run.rollout.unparsed

    @property
    def cut_off(self) -> bool:
        """Whether an answer of the policy ended at its length limit."""
        return bool(self.run.rollout.cut_off)


@dataclass(frozen=True)
class Limits:
    """How many runs at once, and how long one may take before the batch goes on without it."""

    threads: int = 16
    run_seconds: float = 1200.0


class _ParseWatch(BaseCallback):
    """Notes which request's answer did not parse, also where the program swallows the exception."""

    def on_adapter_parse_end(
        self, call_id: str, outputs: dict[str, Any] | None, exception: BaseException | None = None
    ) -> None:
        call = last_call()
        if not isinstance(exception, AdapterParseError) or call is None:
            return
        if call.predictor == call.rollout.predictors.calling():  # not the answer of some other LM
            call.rollout.unparsed.add((call.predictor, call.index))


_WATCH = _ParseWatch()


def run_all(
    program: dspy.Module, runs: Sequence[Run], metric: Metric, adapter: dspy.Adapter, limits: Limits
) -> list[Finished]:
    """All runs, in their order. Raises TrainingFailed when the metric never scores.

    Threads are daemons in a copy of this context: DSPy's settings come along, and a program that hangs
    neither holds the batch (it is "overdue") nor the end of the process.
    """
    work: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index in range(len(runs)):
        work.put(index)
    batch = _Batch(len(runs))

    def worker() -> None:
        while not batch.stopped:
            try:
                index = work.get_nowait()
            except queue.Empty:
                return
            batch.begin(index)
            try:
                batch.finish(index, _run(program, runs[index], metric, adapter))
            except BaseException as error:  # noqa: BLE001 - carried to the thread that waits for the batch
                batch.abort(error)

    for _ in range(min(limits.threads, len(runs))):
        threading.Thread(target=contextvars.copy_context().run, args=(worker,), daemon=True).start()
    try:
        with _quiet_dspy():
            finished = batch.wait(limits.run_seconds)
    finally:
        batch.stopped = True
    late = f"no result within {limits.run_seconds:g} s"
    return [it or Finished(run, "overdue", reason=late) for run, it in zip(runs, finished, strict=True)]


class _Batch:
    """What the workers of one batch share."""

    def __init__(self, size: int) -> None:
        self.stopped = False
        self._finished: list[Finished | None] = [None] * size
        self._began: dict[int, float] = {}
        self._left = size
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def begin(self, index: int) -> None:
        with self._changed:
            self._began[index] = time.monotonic()

    def finish(self, index: int, finished: Finished) -> None:
        with self._changed:
            self._began.pop(index, None)
            self._finished[index] = finished
            self._left -= 1
            self._changed.notify_all()

    def abort(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self.stopped = True
            self._changed.notify_all()

    def wait(self, run_seconds: float) -> list[Finished | None]:
        """The results; None for a run that took longer than it may."""
        with self._changed:
            while self._left and self._error is None:
                if self._only_overdue_left(run_seconds):
                    break
                self._changed.wait(1.0)
            if self._error is not None:
                raise self._error
            return list(self._finished)

    def _only_overdue_left(self, run_seconds: float) -> bool:
        now = time.monotonic()
        overdue = sum(now - began > run_seconds for began in self._began.values())
        waiting = self._left - len(self._began)
        return overdue == len(self._began) and (waiting == 0 or overdue > 0)


def _run(program: dspy.Module, run: Run, metric: Metric, adapter: dspy.Adapter) -> Finished:
    """One run and its score, in the order of what can go wrong."""
    rollout = run.rollout
    callbacks = [*(dspy.settings.callbacks or []), _WATCH]
    prediction, error = None, None
    with in_rollout(rollout, adapter=adapter, callbacks=callbacks, trace=[]):
        try:
            prediction = program(**run.example.inputs())
        except AdapterParseError as caught:
            error = caught
            if not rollout.unparsed:  # an empty answer never reaches an adapter's parse()
                rollout.unparsed |= rollout.empty
        except Exception as caught:  # noqa: BLE001 - whatever a user's program raises is an outcome of the run
            error = caught
    if rollout.lost:
        return Finished(run, "lost", reason=rollout.lost[0])
    if isinstance(error, AdapterParseError) and rollout.unparsed:
        return Finished(run, "unparsed", reason=str(error))
    if isinstance(error, LMError) and not isinstance(error, ContextWindowExceededError):
        return Finished(run, "lost", reason=f"{type(error).__name__}: {error}")
    if error is not None:
        return Finished(run, "crashed", reason=f"{type(error).__name__}: {error}")
    try:
        with outside_rollouts():
            return Finished(run, "scored", metric.score(run.example, prediction), prediction=prediction)
    except Unscored as unscored:
        return Finished(run, "unscored", reason=str(unscored), prediction=prediction)


class _Once(logging.Filter):
    """Lets each warning through once: an answer cut off is counted, not said a thousand times."""

    def __init__(self) -> None:
        super().__init__()
        self._said: set[object] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        known = record.msg in self._said
        self._said.add(record.msg)
        return record.levelno >= logging.ERROR or not known


_ONCE = _Once()


@contextmanager
def _quiet_dspy() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("dspy.clients.lm", "dspy.predict.predict")]
    for logger in loggers:
        logger.addFilter(_ONCE)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(_ONCE)
