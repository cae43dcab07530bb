"""Two decorators for rollouts: so many at once, and so many tries.

Neighbours: a program puts them on the functions that it gathers. Knows nothing of trajectories.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def limit_concurrency(
    n: int, derive_key: Callable[..., str] | None = None
) -> Callable[[Callable[_Given, Awaitable[_Result]]], Callable[_Given, Awaitable[_Result]]]:
    """At most `n` calls of the coroutine function go on at once; with `derive_key`, of each key."""

    def limited(function: Callable[_Given, Awaitable[_Result]]) -> Callable[_Given, Awaitable[_Result]]:
        # A semaphore belongs to one event loop, and each `asyncio.run` has another.
        places: WeakKeyDictionary[Any, dict[str, asyncio.Semaphore]] = WeakKeyDictionary()

        @functools.wraps(function)
        async def call(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
            key = derive_key(*args, **kwargs) if derive_key is not None else ""
            here = places.setdefault(asyncio.get_running_loop(), {})
            async with here.setdefault(key, asyncio.Semaphore(n)):
                return await function(*args, **kwargs)

        return call

    return limited


def retry(
    max_attempts: int = 3,
    delay: float = 0.25,
    backoff_factor: float = 2.0,
    exceptions: tuple[type[Exception], ...] = (Exception,),
    on_retry: Callable[[Exception, int], None] | None = None,
) -> Callable[[Callable[_Given, _Result]], Callable[_Given, _Result]]:
    """Call again after these exceptions, the first time `delay` seconds later; the last one is raised.

    For functions and coroutine functions. `on_retry(error, attempt)` is called for each; without it a line is
    written.
    """

    def wait_after(error: Exception, attempt: int, name: str) -> float:
        if on_retry is not None:
            on_retry(error, attempt)
        else:
            sys.stderr.write(f"slipway: {name}: try {attempt} of {max_attempts} failed: {error!r}\n")
        return delay * backoff_factor ** (attempt - 1)

    def tried(function: Callable[_Given, Any]) -> Callable[_Given, Any]:
        name = getattr(function, "__name__", "a call")

        @functools.wraps(function)
        async def call_async(*args: _Given.args, **kwargs: _Given.kwargs) -> Any:
            for attempt in range(1, max_attempts):
                try:
                    return await function(*args, **kwargs)
                except exceptions as error:
                    seconds = wait_after(error, attempt, name)
                await asyncio.sleep(seconds)
            return await function(*args, **kwargs)

        @functools.wraps(function)
        def call(*args: _Given.args, **kwargs: _Given.kwargs) -> Any:
            for attempt in range(1, max_attempts):
                try:
                    return function(*args, **kwargs)
                except exceptions as error:
                    seconds = wait_after(error, attempt, name)
                time.sleep(seconds)
            return function(*args, **kwargs)

        return call_async if inspect.iscoroutinefunction(function) else call

    return tried
