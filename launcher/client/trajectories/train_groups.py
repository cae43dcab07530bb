"""One training step of groups of trajectories: sent once, and everything in them trained or counted.

The step's key is made of its content. A program that is killed and sends the same again, or a cell that is
run twice, gets the existing step as its answer. Neighbours: `members.py` makes the groups, `program_state.py`
has the state that rides on the step. Knows nothing of gathering.
"""

from __future__ import annotations

import difflib
import hashlib
import inspect
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from pydantic_core import to_json

from launcher.base.sanitize import plain_text as sanitized
from launcher.client.answers import check_client_state
from launcher.client.failures import Rewound, StepFailed, TrainingFailed
from launcher.client.no_progress import NoProgressGuard, NothingToTrain, dropped_text
from launcher.client.program_state import ProgramState
from launcher.client.request_bodies import Group, StepSettings
from launcher.client.schema import StepCounts, StepStatus
from launcher.client.steps import TrainingSteps
from launcher.client.train_once import train_once
from launcher.client.trajectories.members import get_field, group_of
from launcher.client.trajectories.results import StepResult

# The step that these answers were made for was sent by the program before it was killed.
STEP_ALREADY_TAKEN = "step taken already"
_REASONS = "the guide to trajectories has a table of the reasons"
# A step that failed gives its samples back: the same groups may be sent so often.
_MAX_ATTEMPTS = 4


def train(
    steps: TrainingSteps,
    program: ProgramState,
    guard: NoProgressGuard,
    groups: Iterable[Any],
    state: Mapping[str, Any] | None,
    timeout_seconds: float | None,
    settings: Mapping[str, Any],
) -> StepResult:
    """See `Session.train`."""
    step_settings = _step_settings(settings)
    made, left_out = _groups(groups)
    kept, before, earlier = program.for_next_step(state or {})
    check_client_state(kept)
    key = _key(made, kept, step_settings, before)
    if earlier is None and not made:
        program.unsaved = kept  # the next step keeps it
        result = _log_result(StepResult(dropped=dict(left_out)))
        if left_out:
            guard.empty(dropped_text(left_out), _REASONS, before)
        return result
    if earlier is not None:
        take = partial(steps.wait, earlier, timeout_seconds)
    else:
        take = partial(_step, steps, key, made, kept, step_settings, timeout_seconds)
    try:
        status = train_once(take, guard, may_be_late=True)
    except (Rewound, TrainingFailed):  # TrainingFailed: the machine was lost once too often
        program.rewind()
        raise
    if isinstance(status, NothingToTrain):
        program.unsaved = kept
        result = _log_result(_result(status.counts, left_out, metrics=status.metrics))
        guard.empty(dropped_text(result.dropped) or status.why, _REASONS, before, status.counts)
        return result
    program.mark_saved(status.id, kept)
    if earlier is not None and not status.key.startswith(key):
        counts = StepCounts(dropped={STEP_ALREADY_TAKEN: _answer_count(made)})
        return _log_result(_result(counts, left_out, status.metrics, status))
    return _log_result(_result(status.counts, left_out, status.metrics, status))


def _step(
    steps: TrainingSteps,
    key: str,
    groups: list[Group],
    state: dict[str, Any],
    settings: StepSettings | None,
    timeout_seconds: float | None,
) -> StepStatus:
    status = None
    for attempt in range(_MAX_ATTEMPTS):
        name = f"{key}-{attempt}"
        status = steps.step(groups, name, client_state=state or None, wait=False, settings=settings)
        if status.state == "empty":
            return status
        if status.state != "failed":  # as an earlier try that is known by this key
            return steps.wait(status.id, timeout_seconds)
    why = status.error if status else None
    raise StepFailed(
        f"These groups failed {_MAX_ATTEMPTS} times", None, why, "gather others; see `launch logs`"
    )


def _key(groups: list[Group], state: dict[str, Any], settings: StepSettings | None, before: int) -> str:
    """The same for the same content, and for no other.

    A sample's name is given once. A rollout's name may be used again for other answers; after another step it
    is other content, and samples that were trained are not trained again in any case.
    """
    are_rollouts = any(member.rollout for group in groups for member in group.members)
    place = [before] if are_rollouts else []
    content = to_json([groups, state, settings, *place], inf_nan_mode="constants")
    return hashlib.sha256(content).hexdigest()[:48]


def _answer_count(groups: list[Group]) -> int:
    return sum(len(member.samples or (member.rollout,)) for group in groups for member in group.members)


def _step_settings(keywords: Mapping[str, Any]) -> StepSettings | None:
    """Raises TypeError for a keyword that means nothing, as Python does."""
    for name in keywords:
        if name not in StepSettings.model_fields:
            near = difflib.get_close_matches(name, StepSettings.model_fields, 1)
            meant = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"train() got an unexpected keyword argument {name!r}{meant}")
    given = {name: value for name, value in keywords.items() if value is not None}
    return StepSettings(**given) if given else None


def _groups(groups: Any) -> tuple[list[Group], Counter[str]]:
    """The groups to send, and the counts of the parts that are left out. Raises TypeError for objects that
    are no groups."""
    is_one = any(get_field(groups, name) is not None for name in ("trajectories", "messages_and_choices"))
    listed = [groups] if is_one else list(groups)
    made: list[Group] = []
    left_out: Counter[str] = Counter()
    for place, one in enumerate(listed):
        if inspect.isawaitable(one):
            raise TypeError(
                "train() needs groups that are there: `await gather_trajectory_groups(groups)` first"
            )
        if get_field(one, "messages_and_choices") is not None or isinstance(one, BaseException):
            raise TypeError("train() compares rewards within a group: pass TrajectoryGroup([trajectory, …])")
        group, dropped = group_of(one, f"group-{place}")
        left_out += dropped
        made += [group] if group is not None else []
    return made, left_out


def _result(
    counts: StepCounts, left_out: Counter[str], metrics: dict[str, float], status: StepStatus | None = None
) -> StepResult:
    """`status`: of a step that was taken."""
    return StepResult(
        step=status.id if status else None,
        version=status.version if status else None,
        trained=counts.trained,
        joined=counts.turns_joined,
        sealed=counts.sealed,
        dropped=dict(Counter(counts.dropped) + left_out),
        groups=counts.groups,
        groups_without_variance=counts.groups_without_variance,
        metrics=metrics,
    )


def _log_result(result: StepResult) -> StepResult:
    """Log a line for each step, so that a step without anything trained is seen."""
    step = "no step" if result.step is None else f"step {result.step}"
    parts = [f"{result.trained} answers trained"]
    parts += [f"{result.joined} joined"] if result.joined else []
    parts += [f"{result.sealed} sealed"] if result.sealed else []
    parts += [dropped_text(result.dropped)] if result.dropped else []
    sys.stderr.write(f"slipway: {step}: {sanitized(', '.join(parts))}\n")
    sys.stderr.flush()
    return result
