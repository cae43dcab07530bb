"""Jobs side by side in threads, each with a bound of its own: one that hangs delays no other.

Neighbours: `rollouts.py` runs programs in it, `rollout_pool.py` keeps it busy over many steps. Threads are
daemons in a copy of their caller's context: DSPy's settings come along, and a job that hangs delays neither
the others nor the end of the process. Knows nothing of programs, examples or the policy.
"""

from __future__ import annotations

import contextvars
import heapq
import itertools
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Literal, TypeVar, cast

NoResult = Literal["overdue", "not begun"]
"""Why a job has no result: it took longer than it may, or its turn never came."""

_POLL_SECONDS = 1.0
# Jobs left behind, none having ended, that make it sure even with a single thread.
_MIN_TIMEOUTS = 3

_JOIN_SECONDS = 5.0

Result = TypeVar("Result")
_Returned = TypeVar("_Returned")


@dataclass(eq=False)
class WorkerTask(Generic[Result]):
    """One thing to do. `order`: the lowest comes first. `result` counts once `is_done`.

    `on_abandoned` is called when it is not waited for any more, `on_done` when it has its result; both while
    nothing else of the workers changes.
    """

    run: Callable[[], Result]
    order: tuple[int, ...] = ()
    on_abandoned: Callable[[], None] = lambda: None
    on_done: Callable[[], None] = lambda: None
    started_at: float | None = None
    result: Result | NoResult | None = None
    is_done: bool = False


class Workers(Generic[Result]):
    """At most `threads` jobs at a time, and a thread for each only while there is something to do.

    A job that takes longer than `seconds` is left behind and another thread takes its place. Jobs stop
    beginning when more are left behind than there are threads and not one has ended since the workers were
    last idle, or when as many results in a row as there are threads are `hopeless`.
    """

    def __init__(
        self, threads: int, seconds: float, hopeless: Callable[[Result], bool] = lambda result: False
    ) -> None:
        self.changed = threading.Condition()
        self._threads = max(1, threads)
        self._seconds = seconds
        self._hopeless = hopeless
        self._context = contextvars.copy_context()
        self._count = itertools.count()
        self._waiting: list[tuple[tuple[int, ...], int, WorkerTask[Result]]] = []
        self._running: set[WorkerTask[Result]] = set()
        self._threads_running = 0
        self._ended = self._timeouts = self._hopeless_in_a_row = 0
        self._stopped = False
        self._error: BaseException | None = None

    def add(self, jobs: Sequence[WorkerTask[Result]]) -> None:
        """Do these as well."""
        with self.changed:
            if not self._running and not self._waiting:
                self._ended = self._timeouts = self._hopeless_in_a_row = 0
            for job in jobs:
                heapq.heappush(self._waiting, (job.order, next(self._count), job))
            self._start_threads()

    def wait_until(self, is_done: Callable[[], bool]) -> None:
        """Wait, and leave overdue jobs behind. Raises a job's error, at once.

        `is_done` is called whenever something has changed, and while nothing does.
        """
        with self.changed:
            while not self._stopped and not is_done():
                self.changed.wait(self._seconds_to_next_timeout())
                self._time_out_overdue()
            if self._error is not None:
                raise self._error
            if not is_done():
                raise RuntimeError("the jobs were stopped, and are waited for")

    def run_all(self, jobs: Sequence[WorkerTask[Result]]) -> list[Result | NoResult]:
        """The results of these, in their order, once all are there. Raises a job's error."""
        left = set(jobs)
        for job in jobs:
            job.on_done = partial(left.discard, job)
        self.add(jobs)
        self.wait_until(lambda: not left)
        return [cast("Result | NoResult", job.result) for job in jobs]

    def abandon(self, jobs: Collection[WorkerTask[Result]]) -> None:
        """These are not waited for any more: they get no result, and those in progress give up
        their place."""
        with self.changed:
            dropped = set(jobs)
            self._waiting = [it for it in self._waiting if it[2] not in dropped]
            heapq.heapify(self._waiting)
            for job in dropped & self._running:
                self._abandon_running(job)
            self._start_threads()

    def fail(self, error: BaseException) -> None:
        """Raise this error where the jobs are waited for, as if a job had raised it."""
        with self.changed:
            self._error = self._error or error
            self.stop()

    def stop(self) -> None:
        """No thread begins another job, and no caller waits for one in vain."""
        with self.changed:
            self._stopped = True
            self._waiting.clear()
            self.changed.notify_all()

    # ------------------------------------------------------------- the threads

    def _start_threads(self) -> None:
        while not self._stopped and self._threads_running < min(
            self._threads, len(self._running) + len(self._waiting)
        ):
            self._threads_running += 1
            run = self._context.copy().run
            threading.Thread(target=run, args=(self._work,), daemon=True).start()

    def _work(self) -> None:
        try:
            while (job := self._take()) is not None:
                if not self._finish(job, job.run()):
                    return
        except BaseException as error:  # noqa: BLE001 - carried to the thread that waits
            self.fail(error)

    def _take(self) -> WorkerTask[Result] | None:
        with self.changed:
            if self._stopped or not self._waiting:
                self._threads_running -= 1
                return None
            _, _, job = heapq.heappop(self._waiting)
            self._running.add(job)
            job.started_at = time.monotonic()
            return job

    def _finish(self, job: WorkerTask[Result], result: Result) -> bool:
        """Whether this thread still has a place: another has it when the job had been left behind."""
        with self.changed:
            if job not in self._running:
                return False
            self._running.remove(job)
            self._ended += 1
            self._hopeless_in_a_row = self._hopeless_in_a_row + 1 if self._hopeless(result) else 0
            self._set_result(job, result)
            if self._hopeless_in_a_row >= self._threads:
                self._cancel_waiting()
            self.changed.notify_all()
            return True

    # ------------------------------------------------------------- jobs without a result

    def _seconds_to_next_timeout(self) -> float:
        """Seconds until a job may be overdue; the bound lets a Ctrl-C through on every system."""
        began = [job.started_at for job in self._running if job.started_at is not None]
        if not began:
            return _POLL_SECONDS
        return min(_POLL_SECONDS, max(0.01, min(began) + self._seconds - time.monotonic()))

    def _time_out_overdue(self) -> None:
        now = time.monotonic()
        for job in [
            it for it in self._running if it.started_at is not None and now - it.started_at > self._seconds
        ]:
            self._abandon_running(job)
            self._timeouts += 1
            self._set_result(job, "overdue")
            if self._timeouts >= max(self._threads, _MIN_TIMEOUTS) and not self._ended:
                self._cancel_waiting()
            self._start_threads()

    def _abandon_running(self, job: WorkerTask[Result]) -> None:
        self._running.remove(job)
        self._threads_running -= 1
        job.on_abandoned()

    def _cancel_waiting(self) -> None:
        """Jobs that have not begun are not begun."""
        waiting, self._waiting = sorted(self._waiting), []
        for _, _, job in waiting:
            self._set_result(job, "not begun")

    def _set_result(self, job: WorkerTask[Result], result: Result | NoResult) -> None:
        job.result, job.is_done = result, True
        job.on_done()


class BackgroundCall(Generic[_Returned]):
    """A function's result, called in a thread of its own while the jobs of `workers` go on."""

    def __init__(self, workers: Workers[Any], function: Callable[[], _Returned]) -> None:
        self._workers = workers
        self._function = function
        self._returned: list[_Returned] = []
        self._raised: list[BaseException] = []
        run = contextvars.copy_context().run
        self._thread = threading.Thread(target=run, args=(self._call,), daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return bool(self._returned or self._raised)

    def result(self) -> _Returned:
        """The result, once it is over. Raises the error of the function, or of a job, at once."""
        self._workers.wait_until(lambda: self.is_over)
        if self._raised:
            raise self._raised[0]
        return self._returned[0]

    def join(self) -> None:
        """For the function's last part, when the workers have stopped."""
        self._thread.join(_JOIN_SECONDS)

    def _call(self) -> None:
        try:
            self._returned.append(self._function())
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            self._raised.append(error)
        with self._workers.changed:
            self._workers.changed.notify_all()
