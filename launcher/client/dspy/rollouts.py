"""Runs a program on examples, many at a time: each run ends with its score or the reason for none.

Neighbours: `workers.py` runs them side by side, `scoring.py` judges, `tagging.py` tags, `parse_failures.py`
watches the parsing, `external_failures.py` other models' failures, `grouping.py` turns finished runs into
groups. `training.py` and `validation.py` both run programs by it, so that their scores can be compared. Knows
nothing of steps, the wire or the use of a reward.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import dspy
from dspy.utils.exceptions import AdapterParseError, LMError, LMInvalidRequestError

from launcher.client.dspy.external_failures import EXTERNAL_FAILURES, in_metric
from launcher.client.dspy.parse_failures import PARSE_FAILURES
from launcher.client.dspy.predictors import Predictors
from launcher.client.dspy.program_rollout import ProgramRollout, RolloutEnded
from launcher.client.dspy.programs import TrainedPredictors
from launcher.client.dspy.scoring import Metric, MetricScore, Unscored
from launcher.client.dspy.tagging import in_rollout
from launcher.client.dspy.workers import NoResult, Workers, WorkerTask
from launcher.client.error_display import user_code_lines

Outcome = Literal["scored", "unscored", "unparsed", "crashed", "lost", "outside", "overdue"]
"""How a run ended: with a score; without one; with an answer that did not parse; with the program's own
exception; without an answer from the endpoint; failed by another model or a judge; not within its time."""

DEFAULT_CALLS = 256
RUN_BY_HAND = "run the program once by hand on an example of the"
# Runs at once by default: as many as an engine takes by default, and no more than judges often allow. If the
# engines are known to have places for more, as many as these, or a step's. Each has a thread.
DEFAULT_CONCURRENCY = 64
MAX_CONCURRENCY = 256
# Before all runs of a pool.
_BEFORE_POOL = -1


@dataclass(frozen=True)
class ProgramRun:
    """One run to make: the example, its place in the batch, and the rollout it is."""

    example: dspy.Example
    index: int
    rollout: ProgramRollout


@dataclass(frozen=True)
class FinishedRun:
    """One run made. `score` stands for outcome "scored" alone; `reason` for all others."""

    run: ProgramRun
    outcome: Outcome
    score: MetricScore | None = None
    reason: str | None = None
    prediction: Any = None
    # For a run that crashed: the endpoint refused its request, such as a prompt that has grown too long.
    refused: bool = False

    @property
    def parsed(self) -> bool:
        """Whether every answer of the policy in this run parsed; unknown for one that crashed."""
        return self.outcome != "crashed" and not self.run.rollout.unparsed

    @property
    def cut_off(self) -> bool:
        """Whether an answer of the policy ended at its length limit."""
        return bool(self.run.rollout.cut_off)


def all_failed(finished: Sequence[FinishedRun]) -> bool:
    """Whether the program itself failed in every run.

    The policy may be to blame if the program called it for ever or too often, or met an answer that did not
    parse.
    """
    return all(
        it.outcome == "crashed"
        and not (it.refused or it.run.rollout.unparsed or it.run.rollout.reached_call_limit)
        for it in finished
    )


@dataclass(frozen=True)
class RolloutLimits:
    """How many runs at once; how long one may take before the others go on without it; how much it asks.

    `threads` None: all there are, up to the engines' `places` and `MAX_CONCURRENCY`, or `DEFAULT_CONCURRENCY`
    where the places are unknown.
    """

    threads: int | None = None
    run_seconds: float = 1200.0
    run_calls: int = DEFAULT_CALLS
    places: int | None = None

    def concurrency(self, runs: int, of_a_step: int = 0) -> int:
        """How many of so many runs are in progress at a time; a step's own may all be."""
        return self.threads or min(runs, self.places or DEFAULT_CONCURRENCY, max(of_a_step, MAX_CONCURRENCY))

    def concurrency_ahead(self, of_a_step: int) -> int:
        """The same where later steps' runs fill the places, if a step has `of_a_step`."""
        return self.concurrency(max(of_a_step, MAX_CONCURRENCY), of_a_step)


@dataclass
class Runner:
    """Makes jobs of runs of `program`, and finished runs of the jobs' results.

    A run that takes too long is "overdue", and once the endpoint is known to be gone the runs not begun are
    "lost". `predictors` is made once, because runs in progress may write into the program.
    """

    program: dspy.Module
    trained: TrainedPredictors
    metric: Metric
    adapter: dspy.Adapter
    limits: RolloutLimits
    predictors: Predictors = field(init=False)
    # One for which the endpoint stayed away.
    _unreachable: FinishedRun | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.predictors = Predictors(self.program)

    def workers(self, at_once: int) -> Workers[FinishedRun]:
        """For runs alone: so many at a time."""
        return Workers(at_once, self.limits.run_seconds, self._is_hopeless)

    def job(self, run: ProgramRun, order: tuple[int, ...]) -> WorkerTask[FinishedRun]:
        run.rollout.max_calls = self.limits.run_calls
        lm = self.trained.lm
        settings: dict[str, Any] = {"adapter": self.adapter} | ({} if lm is None else {"lm": lm})
        return WorkerTask(partial(_run, self.program, run, self.metric, settings), order, run.rollout.end)

    def finished_run(self, run: ProgramRun, job: WorkerTask[FinishedRun]) -> FinishedRun:
        """The run as its job has it, which has ended."""
        result = job.result or "not begun"
        return (
            result
            if isinstance(result, FinishedRun)
            else _unfinished(run, result, self._unreachable, self.limits)
        )

    def _is_hopeless(self, finished: FinishedRun) -> bool:
        is_gone = finished.outcome == "lost" and finished.run.rollout.is_unreachable
        if finished.run.rollout.is_unreachable:
            self._unreachable = finished
        return is_gone


def run_all(
    runner: Runner, runs: Sequence[ProgramRun], workers: Workers[FinishedRun] | None = None
) -> list[FinishedRun]:
    """All runs, in their order. Raises TrainingFailed when the metric never scores.

    `workers`: a pool's, where these runs come first; else it has its own. When this returns, or raises, all
    these runs have ended: further requests of a program fail (RolloutEnded).
    """
    at_work = workers or runner.workers(runner.limits.concurrency(len(runs)))
    jobs = [runner.job(run, (_BEFORE_POOL, index)) for index, run in enumerate(runs)]
    try:
        with quiet_dspy():
            at_work.run_all(jobs)
    finally:
        at_work.abandon(jobs)
        for run in runs:
            run.rollout.end()
    return [runner.finished_run(run, job) for run, job in zip(runs, jobs, strict=True)]


def _unfinished(
    run: ProgramRun, late: NoResult, gone: FinishedRun | None, limits: RolloutLimits
) -> FinishedRun:
    if late == "not begun" and gone is not None:
        return FinishedRun(run, "lost", reason=gone.reason)
    if late == "not begun":
        return FinishedRun(
            run, "overdue", reason=f"not begun: none before it ended within {limits.run_seconds:g} s"
        )
    part = "the metric gave no score" if run.rollout.is_in_metric else "no result"
    return FinishedRun(run, "overdue", reason=f"{part} within {limits.run_seconds:g} s")


def _run(program: dspy.Module, run: ProgramRun, metric: Metric, settings: Mapping[str, Any]) -> FinishedRun:
    """One run and its score; the order of the steps is that of the possible errors.

    The example is a copy: a program or a metric that writes into it changes no other run's.
    """
    rollout, example = run.rollout, _copy_example(run.example)
    callbacks = [*(dspy.settings.callbacks or []), PARSE_FAILURES, EXTERNAL_FAILURES]
    prediction, error = None, None
    with in_rollout(rollout, callbacks=callbacks, trace=[], **settings):
        try:
            prediction = _call(program, example)
        except (Exception, SystemExit, RolloutEnded) as caught:  # noqa: BLE001 - its errors are outcomes
            error = caught
    if rollout.endpoint_errors:
        return FinishedRun(run, "lost", reason=rollout.endpoint_errors[0])
    if rollout.external_failures:
        return FinishedRun(run, "outside", reason=rollout.external_failure_reason)
    if rollout.unparsed and (
        isinstance(error, AdapterParseError) or _is_same_error(error, rollout.parse_error)
    ):
        return FinishedRun(run, "unparsed", reason=str(error))
    if isinstance(error, LMError) and not isinstance(error, LMInvalidRequestError):
        return FinishedRun(run, "lost", reason=f"{type(error).__name__}: {error}")
    if error is not None and _is_tqdm_race(error):
        return FinishedRun(run, "lost", reason=f"dspy.Parallel failed in its own progress bars: {error}")
    if error is not None:
        return FinishedRun(run, "crashed", reason=_error_text(error), refused=_is_refused(error))
    return _score(run, metric, example, prediction)


def _score(run: ProgramRun, metric: Metric, example: dspy.Example, prediction: Any) -> FinishedRun:
    """The score of a run that has a result; the answer of a failed judge is no score."""
    score, reason = None, None
    with in_metric(run.rollout):
        try:
            score = metric.score(example, prediction)
        except Unscored as unscored:
            reason = str(unscored)
    if run.rollout.external_failures:
        return FinishedRun(run, "outside", reason=run.rollout.external_failure_reason, prediction=prediction)
    return FinishedRun(run, "scored" if score else "unscored", score, reason, prediction)


def _call(program: dspy.Module, example: dspy.Example) -> Any:
    """Run the program, which may be asynchronous in any way there is."""
    inputs: Any = example.inputs()  # unpacks as a mapping
    if "forward" in vars(program) or hasattr(type(program), "forward"):
        prediction = program(**inputs)
    else:
        prediction = program.acall(**inputs)
    return asyncio.run(_awaited(prediction)) if inspect.isawaitable(prediction) else prediction


async def _awaited(answer: Any) -> Any:
    return await answer


def _copy_example(example: dspy.Example) -> dspy.Example:
    try:
        return copy.deepcopy(example)
    except Exception:  # noqa: BLE001 - its values may refuse to be copied; then its fields are shared
        return example.copy().with_inputs(*example.inputs().keys())


def _is_same_error(error: BaseException | None, other: BaseException | None) -> bool:
    return error is not None and error is other


def _is_refused(error: BaseException | None) -> bool:
    """Whether the error, or its cause, is the endpoint's refusal."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, LMInvalidRequestError):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def _is_tqdm_race(error: BaseException) -> bool:
    """A Parallel that begins clears tqdm's set of bars (DSPy 3.4.1) under the feet of those in other threads.

    That is neither the program's fault nor the policy's.
    """
    places = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return isinstance(error, (KeyError, RuntimeError)) and any(
        before.endswith("parallelizer.py") and "tqdm" in place for before, place in pairwise(places)
    )


def _error_text(error: BaseException) -> str:
    if isinstance(error, RolloutEnded):
        return str(error)
    where = "".join(f" ({it})" for it in user_code_lines(error)[-1:])
    return f"{type(error).__name__}: {error}{where}"


class _OncePerMessage(logging.Filter):
    """Lets each warning through once: an answer that was cut off is counted, not logged a thousand times."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[object] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        known = record.msg in self._seen
        self._seen.add(record.msg)
        return record.levelno >= logging.ERROR or not known


_ONCE = _OncePerMessage()
_LOGGERS = tuple(logging.getLogger(name) for name in ("dspy.clients.lm", "dspy.predict.predict"))
_quiet_lock = threading.Lock()
# One may be within another: a validation beside a pool.
_quiet: list[object] = []


@contextmanager
def quiet_dspy() -> Iterator[None]:
    """DSPy logs each of its warnings once, until the last of these ends."""
    mine = object()
    with _quiet_lock:
        _quiet.append(mine)
        for logger in _LOGGERS:
            logger.addFilter(_ONCE)
    try:
        yield
    finally:
        with _quiet_lock:
            _quiet.remove(mine)
            for logger in _LOGGERS if not _quiet else ():
                logger.removeFilter(_ONCE)
