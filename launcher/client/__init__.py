"""The names that programs import: `connect` for their run, `start` to begin one; for DSPy, `PolicyLM` and
`GRPO`.

DSPy is imported when one of the names that need it is touched, never before.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from launcher.client.failures import (
    ClientError,
    EndpointLost,
    NotConnected,
    Refused,
    Rewound,
    StepFailed,
    TrainingFailed,
)
from launcher.client.groups import group
from launcher.client.session import Session, connect

if TYPE_CHECKING:
    from launcher.client import arbor
    from launcher.client.dspy.grpo import GRPO
    from launcher.client.dspy.lm import PolicyLM
    from launcher.client.dspy.program_loading import load
    from launcher.client.dspy.tagging import rollout
    from launcher.client.dspy.validation import evaluate
    from launcher.client.ruler.score_group import ruler_score_group
    from launcher.client.started_run import start
    from launcher.client.trajectories.ahead import gather_ahead
    from launcher.client.trajectories.concurrency import limit_concurrency, retry
    from launcher.client.trajectories.gathering import gather_trajectories, gather_trajectory_groups
    from launcher.client.trajectories.trajectory import History, Trajectory
    from launcher.client.trajectories.trajectory_group import TrajectoryGroup

__all__ = [
    "GRPO",
    "ClientError",
    "EndpointLost",
    "History",
    "NotConnected",
    "PolicyLM",
    "Refused",
    "Rewound",
    "Session",
    "StepFailed",
    "TrainingFailed",
    "Trajectory",
    "TrajectoryGroup",
    "arbor",
    "connect",
    "evaluate",
    "gather_ahead",
    "gather_trajectories",
    "gather_trajectory_groups",
    "group",
    "limit_concurrency",
    "load",
    "retry",
    "rollout",
    "ruler_score_group",
    "start",
]

_LATER = {
    "GRPO": "dspy.grpo",
    "History": "trajectories.trajectory",
    "PolicyLM": "dspy.lm",
    "Trajectory": "trajectories.trajectory",
    "TrajectoryGroup": "trajectories.trajectory_group",
    "evaluate": "dspy.validation",
    "gather_ahead": "trajectories.ahead",
    "gather_trajectories": "trajectories.gathering",
    "gather_trajectory_groups": "trajectories.gathering",
    "limit_concurrency": "trajectories.concurrency",
    "load": "dspy.program_loading",
    "retry": "trajectories.concurrency",
    "rollout": "dspy.tagging",
    "ruler_score_group": "ruler.score_group",
    "start": "started_run",
}


def __getattr__(name: str) -> Any:
    if name == "arbor":
        return import_module(f"{__name__}.arbor")
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
