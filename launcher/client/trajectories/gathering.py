"""Awaits many groups, or many trajectories, at once: with a line that shows the progress, and exceptions as
data.

Neighbours: `trajectory_group.py` awaits one group and counts into `gather_context.py`; `concurrency.py`
bounds how many rollouts go on at once. Knows nothing of a run, nor of a rollout's making.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from launcher.client.trajectories.gather_context import GatherContext, current_context, use_context
from launcher.client.trajectories.members import get_field
from launcher.client.trajectories.trajectory_group import PendingGroup, TrajectoryGroup, gather_or_cancel

# A judge or a filter: its result replaces the group, and None leaves the group out.
AfterEach = Callable[[TrajectoryGroup], Any]


async def gather_trajectory_groups(
    groups: Iterable[Awaitable[TrajectoryGroup] | TrajectoryGroup],
    *,
    pbar_desc: str | None = "gather",
    max_exceptions: float = 0,
    max_metrics: int | None = None,
    after_each: AfterEach | None = None,
) -> list[TrajectoryGroup]:
    """All groups, in their order.

    An exception of a rollout is kept in its group, up to `max_exceptions` of them in all (below 1: that
    share of the trajectories); the next one ends the others and is raised. `after_each` is called with each
    group as soon as it is there, and may be a coroutine function: it returns a group, a list of groups, or
    None to leave the group out. Where it fails, the group has that exception too, and no trajectories. The
    line on a terminal begins with `pbar_desc` (None: no line) and has the averages of `max_metrics`
    metrics.
    """
    pending = list(groups)
    context = GatherContext(max_exceptions, sum(map(expected_size, pending)), pbar_desc, max_metrics)
    with use_context(context):
        found = await gather_or_cancel(gather_group(one, after_each) for one in pending)
    return [group for groups_of_one in found for group in groups_of_one]


async def gather_trajectories(
    trajectories: Iterable[Awaitable[Any]], *, pbar_desc: str | None = "gather", max_exceptions: float = 0
) -> list[Any]:
    """All trajectories, in their order; in the place of one that failed is its exception.

    Of exceptions there are at most `max_exceptions`. An awaitable may also return several trajectories: they
    are a list in that place.
    """
    pending = list(trajectories)
    context = GatherContext(max_exceptions, len(pending), pbar_desc)
    with use_context(context):
        return await gather_or_cancel(map(_await_trajectories, pending))


def expected_size(pending: Awaitable[TrajectoryGroup] | TrajectoryGroup) -> int:
    """The number of trajectories that it will return, if known."""
    return len(pending) if isinstance(pending, PendingGroup | TrajectoryGroup) else 1


async def gather_group(
    pending: Awaitable[TrajectoryGroup] | TrajectoryGroup, after_each: AfterEach | None
) -> list[TrajectoryGroup]:
    """A group once it is there, after `after_each`; counted in the gathering around it."""
    group = pending if isinstance(pending, TrajectoryGroup) else await _await_group(pending)
    if after_each is None:
        return [group]
    try:
        after = after_each(group)
        after = await after if inspect.isawaitable(after) else after
    except Exception as error:  # data, up to `max_exceptions`
        if current_context().count_exception():
            raise
        after = TrajectoryGroup([error], exceptions=group.exceptions, metadata=group.metadata)
    return after if isinstance(after, list) else [] if after is None else [after]


async def _await_group(pending: Awaitable[TrajectoryGroup]) -> TrajectoryGroup:
    """A group; one that failed as a whole has its exception, and no trajectories."""
    if isinstance(pending, PendingGroup):
        return await pending
    context = current_context()
    try:
        group = await pending
    except Exception as error:  # data, up to `max_exceptions`
        if context.count_exception():
            raise
        return TrajectoryGroup([error])
    for trajectory in group:
        context.add(trajectory)
    return group


async def _await_trajectories(pending: Awaitable[Any]) -> Any:
    context = current_context()
    try:
        found = await pending
    except Exception as error:  # data, up to `max_exceptions`
        if context.count_exception():
            raise
        return error
    is_one = get_field(found, "messages_and_choices") is not None or not isinstance(found, Iterable)
    several = [found] if is_one else list(found)
    for trajectory in several:
        context.add(trajectory)
    return found if is_one else several
