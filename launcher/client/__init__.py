"""What a program imports: `connect` for its run; for DSPy, `PolicyLM` and the optimizer `GRPO`.

DSPy is imported when one of the names that need it is touched, never before.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from launcher.client.errors import (
    ClientError,
    EndpointLost,
    NotConnected,
    Refused,
    Rewound,
    StepFailed,
    TrainingFailed,
)
from launcher.client.session import Session, connect, group

if TYPE_CHECKING:
    from launcher.client.grpo import GRPO
    from launcher.client.lm import PolicyLM
    from launcher.client.saved import load
    from launcher.client.tagging import rollout
    from launcher.client.validation import evaluate

__all__ = [
    "GRPO",
    "ClientError",
    "EndpointLost",
    "NotConnected",
    "PolicyLM",
    "Refused",
    "Rewound",
    "Session",
    "StepFailed",
    "TrainingFailed",
    "connect",
    "evaluate",
    "group",
    "load",
    "rollout",
]

_NEED_DSPY = {
    "GRPO": "grpo",
    "PolicyLM": "lm",
    "evaluate": "validation",
    "load": "saved",
    "rollout": "tagging",
}


def __getattr__(name: str) -> Any:
    if name not in _NEED_DSPY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_NEED_DSPY[name]}"), name)
