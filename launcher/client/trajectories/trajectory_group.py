"""A group: trajectories of one task that are compared with one another, and the exceptions of others.

    group = await TrajectoryGroup(rollout(task) for _ in range(8))

From finished trajectories it is made at once; from coroutines it is an awaitable, to be given to
`gather_trajectory_groups`. Neighbours: `trajectory.py` has one of them, `gathering.py` awaits many groups.
Knows nothing of a run.
"""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Awaitable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, overload

from pydantic import BaseModel

from launcher.client.trajectories.gather_context import current_context
from launcher.client.trajectories.trajectory import Metadata, Metrics, Trajectory

_Result = TypeVar("_Result")


class Raised(BaseModel):
    """An exception as data."""

    type: str
    message: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> Raised:
        """The exception's type, message and traceback."""
        trace = "".join(traceback.format_exception(error))
        return cls(type=f"{type(error)}", message=str(error), traceback=trace)


class TrajectoryGroup(BaseModel):
    """Rewards count against those of the same group. `exceptions` are counted when the group is trained."""

    trajectories: list[Trajectory]
    exceptions: list[Raised] = []
    metadata: Metadata = {}
    metrics: Metrics = {}
    logs: list[str] = []

    @overload
    def __new__(
        cls, trajectories: Iterable[Trajectory | BaseException], **fields: Any
    ) -> TrajectoryGroup: ...

    @overload
    def __new__(cls, trajectories: Iterable[Awaitable[Trajectory]], **fields: Any) -> PendingGroup: ...

    def __new__(cls, trajectories: Iterable[Any] = (), **fields: Any) -> TrajectoryGroup | PendingGroup:
        given = list(trajectories)
        if any(map(inspect.isawaitable, given)):
            return PendingGroup(given, fields)
        made = super().__new__(cls)
        if not isinstance(trajectories, Sequence):
            made.__init__(given, **fields)  # a generator gives them once
        return made

    def __init__(
        self,
        trajectories: Iterable[Any] = (),
        *,
        exceptions: Iterable[BaseException | Raised | Mapping[str, Any]] = (),
        metadata: Metadata | None = None,
        metrics: Metrics | None = None,
        logs: list[str] | None = None,
    ) -> None:
        if "trajectories" in self.__dict__:  # made by __new__
            return
        given = list(trajectories)
        raised = [*(it for it in given if isinstance(it, BaseException)), *exceptions]
        super().__init__(
            trajectories=[it for it in given if not isinstance(it, BaseException)],
            exceptions=[Raised.of(it) if isinstance(it, BaseException) else it for it in raised],
            metadata=metadata or {},
            metrics=metrics or {},
            logs=logs or [],
        )

    def log(self, message: str) -> None:
        """Keep a line with the group."""
        self.logs.append(message)

    def __iter__(self) -> Iterator[Trajectory]:  # type: ignore[override]
        return iter(self.trajectories)

    def __len__(self) -> int:
        return len(self.trajectories)


class PendingGroup:
    """A group whose trajectories are still to come: await it once."""

    def __init__(self, awaited: list[Any], fields: Mapping[str, Any]) -> None:
        self._awaited = awaited
        self._fields = fields

    def __len__(self) -> int:
        return len(self._awaited)

    def close(self) -> None:
        """Close the parts that have not begun: they are not awaited any more."""
        for awaited in self._awaited:
            close_unawaited(awaited)

    def __await__(self) -> Generator[Any, None, TrajectoryGroup]:
        return self._gathered().__await__()

    async def _gathered(self) -> TrajectoryGroup:
        """The group in the order in which its trajectories were given, whichever came first."""
        results = await gather_or_cancel(self._one(it) for it in self._awaited)
        return TrajectoryGroup(results, **self._fields)

    async def _one(self, awaited: Any) -> Trajectory | Exception:
        if not inspect.isawaitable(awaited):
            return awaited
        context = current_context()
        try:
            trajectory = await awaited
        except Exception as error:  # data, up to `max_exceptions`; a cancellation is none
            if context.count_exception():
                raise
            return error
        context.add(trajectory)
        return trajectory


def close_unawaited(awaited: Any) -> None:
    """Close a coroutine that is not awaited any more, so that Python does not warn; a running one goes on."""
    is_new = inspect.iscoroutine(awaited) and inspect.getcoroutinestate(awaited) == inspect.CORO_CREATED
    if is_new or isinstance(awaited, PendingGroup):
        awaited.close()


async def gather_or_cancel(awaited: Iterable[Awaitable[_Result]]) -> list[_Result]:
    """The results of all of them. At the first exception the others are cancelled, before it is raised."""
    tasks = [asyncio.ensure_future(one) for one in awaited]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:  # a cancellation too leaves none of them in progress
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
