"""Groups of trajectories that are rolled out ahead, and end when a test says so."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

from launcher.client import Session, Trajectory, TrajectoryGroup, gather_ahead
from launcher.client.trajectories.ahead import StepGroups

E, K = 2, 2
PATIENCE = 15


def answered(version: int | None, reward: float | None) -> Trajectory:
    said = {"slipway": {"sample": "a:0", "version": version}} if version is not None else {}
    entry = {"finish_reason": "stop", "message": {"role": "assistant", "content": "yes"}} | said
    return Trajectory(messages_and_choices=[entry], reward=reward)


@dataclass
class Played:
    """Groups of `K` rollouts; those of group n come by `finish(n)`."""

    session: Session
    begun: list[int] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    ends: dict[tuple[int, int], asyncio.Future[Trajectory]] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    # Of what was cancelled, for whom its end waits for.
    hold: dict[int, asyncio.Future[None]] = field(default_factory=dict)

    async def rollout(self, number: int, member: int) -> Trajectory:
        if not member:
            self.begun.append(number)
        end = self.ends[number, member] = asyncio.get_running_loop().create_future()
        self.changed.set()
        try:
            return await end
        except asyncio.CancelledError:
            if number in self.hold:
                await self.hold[number]
            for _ in range(5):  # it has something to put in order
                await asyncio.sleep(0)
            if not member:
                self.cancelled.append(number)
            raise

    def group(self, number: int) -> Any:
        return TrajectoryGroup((self.rollout(number, member) for member in range(K)), metadata={"n": number})

    def given(self, count: int) -> Iterator[Any]:
        for number in range(count):
            yield self.group(number)

    async def finish(self, *numbers: int, version: int | None = None, rewards: Any = (0.0, 1.0)) -> None:
        for number in numbers:
            await self.until(lambda number=number: (number, K - 1) in self.ends)
            for member in range(K):
                self.ends[number, member].set_result(answered(version, rewards[member]))
        await turns()

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not is_so():
                self.changed.clear()
                await self.changed.wait()

    async def has_begun(self, *numbers: int) -> None:
        """These, and no others."""
        await self.until(lambda: len(self.begun) >= len(numbers))
        await turns()
        assert self.begun == [*numbers]


async def turns() -> None:
    """All that can go on without an answer has."""
    for _ in range(30):
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def ahead(played: Played, groups: Any = None, **said: Any) -> AsyncIterator[Any]:
    bounds: dict[str, Any] = {"per_step": E, "staleness": 1, "pbar_desc": None} | said
    given = played.given(1000) if groups is None else groups
    async with contextlib.aclosing(gather_ahead(played.session, given, **bounds)) as steps:
        yield steps


@contextlib.asynccontextmanager
async def releasing(held: asyncio.Future[None]) -> AsyncIterator[None]:
    try:
        yield
    finally:
        held.set_result(None)


def next_of(steps: Any) -> asyncio.Task[StepGroups]:
    return asyncio.create_task(anext(steps))


def played_out(work: Coroutine[Any, Any, Any]) -> Any:
    """Run it; nothing is left behind by it, and Python has no word to say of it."""
    complaints: list[Any] = []

    async def heard() -> Any:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        async with asyncio.timeout(PATIENCE):
            return await work

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            return asyncio.run(heard())
        finally:
            gc.collect()
            assert not complaints
            assert not [it for it in warned if "await" in str(it.message) or "Task" in str(it.message)]
