"""Jobs side by side in threads, each with a bound of its own: one that hangs holds nobody up.

Neighbour: `rollouts.py` has it run programs. Threads are daemons in a copy of the caller's context: DSPy's
settings come along, and a job that hangs holds neither the batch nor the end of the process.
Knows nothing of programs, examples or the policy.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, Literal, TypeVar

Late = Literal["overdue", "not begun"]
"""Why a job has no result: it took longer than it may, or its turn never came."""

_LOOK_SECONDS = 1.0
# Jobs left behind, none having ended, that make it sure even with a single thread.
_SURE = 3

Result = TypeVar("Result")


def work_off(
    jobs: Sequence[Callable[[], Result]],
    threads: int,
    seconds: float,
    hopeless: Callable[[Result], bool] = lambda result: False,
    left_behind: Callable[[int], None] = lambda index: None,
) -> list[Result | Late]:
    """The jobs' results in their order. Raises what a job raises, at once.

    A job that takes longer than `seconds` is left behind (`left_behind` is told its index) and another thread
    takes its place; when as many are left behind as there are threads (and some) and not one job has come to
    an end, the rest is not begun. Neither is it when as many results in a row as there are threads are
    `hopeless`.
    """
    batch = _Batch(jobs, max(1, min(threads, len(jobs))), seconds, hopeless, left_behind)
    try:
        return batch.wait()
    finally:
        batch.stop()


class _Batch(Generic[Result]):
    """What the threads of one batch share."""

    def __init__(
        self,
        jobs: Sequence[Callable[[], Result]],
        threads: int,
        seconds: float,
        hopeless: Callable[[Result], bool],
        left_behind: Callable[[int], None],
    ) -> None:
        self._jobs = jobs
        self._threads = threads
        self._seconds = seconds
        self._hopeless = hopeless
        self._tell_left_behind = left_behind
        self._results: list[Result | Late] = ["not begun"] * len(jobs)
        self._next = 0
        self._began: dict[int, float] = {}
        self._ended = 0
        self._left_behind = 0
        self._hopeless_in_a_row = 0
        self._stopped = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def wait(self) -> list[Result | Late]:
        with self._changed:
            for _ in range(self._threads):
                self._start_thread()
            while self._error is None and (self._began or not self._over):
                self._changed.wait(self._until_next_look())
                self._leave_behind()
            if self._error is not None:
                raise self._error
            return list(self._results)

    def stop(self) -> None:
        """No thread begins another job."""
        with self._changed:
            self._stopped = True

    @property
    def _over(self) -> bool:
        return self._stopped or self._next == len(self._jobs)

    def _start_thread(self) -> None:
        threading.Thread(target=contextvars.copy_context().run, args=(self._work,), daemon=True).start()

    def _work(self) -> None:
        while (index := self._take()) is not None:
            try:
                result = self._jobs[index]()
            except BaseException as error:  # noqa: BLE001 - carried to the thread that waits for the batch
                self._fail(error)
                return
            if not self._finish(index, result):
                return

    def _take(self) -> int | None:
        with self._changed:
            if self._over:
                self._changed.notify_all()
                return None
            index = self._next
            self._next += 1
            self._began[index] = time.monotonic()
            return index

    def _finish(self, index: int, result: Result) -> bool:
        """Whether this thread still has a place: another has it when the job had been left behind."""
        with self._changed:
            if self._began.pop(index, None) is None:
                return False
            self._results[index] = result
            self._ended += 1
            self._hopeless_in_a_row = self._hopeless_in_a_row + 1 if self._hopeless(result) else 0
            self._stopped = self._stopped or self._hopeless_in_a_row >= self._threads
            self._changed.notify_all()
            return True

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._stopped = True
            self._changed.notify_all()

    def _until_next_look(self) -> float:
        """Seconds until a job may be overdue; the bound lets a Ctrl-C through on every system."""
        if not self._began:
            return _LOOK_SECONDS
        first = min(self._began.values()) + self._seconds
        return min(_LOOK_SECONDS, max(0.01, first - time.monotonic()))

    def _leave_behind(self) -> None:
        now = time.monotonic()
        for index in [it for it, began in self._began.items() if now - began > self._seconds]:
            del self._began[index]
            self._results[index] = "overdue"
            self._left_behind += 1
            self._tell_left_behind(index)
            if self._left_behind >= max(self._threads, _SURE) and not self._ended:
                self._stopped = True
            if not self._over:
                self._start_thread()
