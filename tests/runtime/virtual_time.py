"""An event loop whose time passes only when nothing else is left to do, and then at once.

What is done in threads is done in the loop's own, after so many seconds of its time: every order of events is
the same again. For state machines of code that sleeps and polls.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class VirtualLoop(asyncio.SelectorEventLoop):
    """`thread_seconds`: how long each piece of work in a thread takes."""

    def __init__(self, thread_seconds: float = 0.0) -> None:
        self._now = 0.0
        super().__init__(_Selector(self._pass))
        self.set_default_executor(_Threads(self, thread_seconds))

    def time(self) -> float:
        """Seconds since its beginning."""
        return self._now

    def go_on(self, seconds: float) -> None:
        """Run everything for so long of its time."""
        self.run_until_complete(asyncio.sleep(seconds))

    def end_all(self) -> None:
        """Cancel every task and see it end."""
        tasks = asyncio.all_tasks(self)
        for task in tasks:
            task.cancel()
        self.run_until_complete(_ended(tasks))

    def _pass(self, seconds: float) -> None:
        self._now += seconds


async def _ended(tasks: set[asyncio.Task[Any]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)


class _Selector(selectors.DefaultSelector):
    """Waits for nothing: the time that it would have waited has passed."""

    def __init__(self, pass_time: Callable[[float], None]) -> None:
        super().__init__()
        self._pass_time = pass_time

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None and not (found := super().select(0)):
            raise AssertionError("everything waits, and for nothing that could come")
        if timeout is None:
            return found
        self._pass_time(max(0.0, timeout))
        return super().select(0)


class _Threads(ThreadPoolExecutor):
    def __init__(self, loop: VirtualLoop, seconds: float) -> None:
        super().__init__(1)
        self._loop = loop
        self._seconds = seconds

    def submit(self, work: Callable[..., Any], /, *words: Any, **more: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work(*words, **more))
                except BaseException as error:  # noqa: BLE001 - whoever waits for it gets it
                    future.set_exception(error)

        self._loop.call_later(self._seconds, run)
        return future
