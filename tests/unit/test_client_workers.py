"""Jobs side by side: one that hangs holds nobody up, and a batch always ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest

from launcher.client.dspy.workers import NoResult, Workers, WorkerTask


@pytest.fixture
def never() -> Iterator[threading.Event]:
    """Hanging jobs wait for it; they are let go when the test is over."""
    event = threading.Event()
    yield event
    event.set()


def work_off(
    jobs: Sequence[Callable[[], Any]],
    threads: int,
    seconds: float,
    hopeless: Callable[[Any], bool] = lambda result: False,
    left_behind: Callable[[int], None] = lambda index: None,
) -> list[Any | NoResult]:
    """The results of these jobs, of workers of their own."""
    workers = Workers[Any](min(threads, len(jobs)), seconds, hopeless)
    made = [WorkerTask(do, (index,), partial(left_behind, index)) for index, do in enumerate(jobs)]
    return workers.run_all(made)


def hanging(never: threading.Event) -> Callable[[], str]:
    return lambda: str(never.wait(60))


def test_results_come_in_the_order_of_the_jobs() -> None:
    def job(number: int) -> Callable[[], int]:
        return lambda: time.sleep(0.02 * (5 - number)) or number

    assert work_off([job(number) for number in range(5)], threads=5, seconds=30) == [0, 1, 2, 3, 4]


def test_no_more_jobs_run_at_once_than_there_are_threads() -> None:
    lock, at_work, most = threading.Lock(), [0], [0]

    def job() -> None:
        with lock:
            at_work[0] += 1
            most[0] = max(most[0], at_work[0])
        time.sleep(0.01)
        with lock:
            at_work[0] -= 1

    work_off([job] * 20, threads=3, seconds=30)
    assert most[0] == 3


def test_nothing_to_do_is_done_at_once() -> None:
    assert work_off([], threads=4, seconds=30) == []


@pytest.mark.process
def test_a_job_that_hangs_is_left_behind_and_its_thread_replaced(never: threading.Event) -> None:
    told: list[int] = []
    jobs = [lambda: "a", hanging(never), lambda: "b", lambda: "c"]
    assert work_off(jobs, threads=1, seconds=0.3, left_behind=told.append) == ["a", "overdue", "b", "c"]
    assert told == [1]


@pytest.mark.slow
def test_jobs_that_all_hang_are_given_up_after_some(never: threading.Event) -> None:
    found = work_off([hanging(never)] * 50, threads=4, seconds=0.2)
    assert found == ["overdue"] * 4 + ["not begun"] * 46


def test_hopeless_results_in_a_row_end_the_batch() -> None:
    found = work_off([lambda: "gone"] * 50, threads=2, seconds=30, hopeless=lambda result: result == "gone")
    assert found.count("gone") <= 4
    assert set(found) == {"gone", "not begun"}


def test_a_hopeless_result_among_others_ends_nothing() -> None:
    jobs = [lambda: "gone", lambda: "fine"] * 10
    found = work_off(jobs, threads=1, seconds=30, hopeless=lambda result: result == "gone")
    assert found == ["gone"] + ["not begun"] * 19  # one thread: one is as many in a row as there are threads
    found = work_off(jobs, threads=2, seconds=30, hopeless=lambda result: False)
    assert found == ["gone", "fine"] * 10


def test_what_a_job_raises_is_raised_at_once(never: threading.Event) -> None:
    def fails() -> str:
        raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        work_off([hanging(never), fails, *[hanging(never)] * 20], threads=2, seconds=300)
    assert time.monotonic() - began < 60
