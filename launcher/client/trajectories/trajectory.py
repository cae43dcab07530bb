"""A trajectory: the history of one rollout, the answers in it as they came, and the reward for them.

The fields are those of openpipe-art 0.5.18, with two differences: a missing reward is None and is never
trained, and a trajectory may name its `rollout` where an agent keeps its answers to itself.
Neighbours: `trajectory_group.py` has several that are compared, `members.py` picks the trained part of one.
Knows nothing of a run.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import datetime
from types import TracebackType
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field

from launcher.client.trajectories.members import get_field, is_choice

Metadata = dict[str, float | int | str | bool | None]
Metrics = dict[str, float | int | bool]


class History(BaseModel):
    """Another conversation of the same rollout: a sub-agent's, or an earlier one that was compacted."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    # Messages as they are sent, and answers (`response.choices[0]`) as they came.
    messages_and_choices: list[Any] = []
    tools: list[Any] | None = None

    def messages(self) -> list[dict[str, Any]]:
        """The history as messages, which can be sent with the next request."""
        return [message_of(entry) for entry in self.messages_and_choices]


class Trajectory(History):
    """One rollout. Append the choices themselves, not their text: they identify the sampled tokens."""

    additional_histories: list[History] = []
    reward: float | None = None
    # All that was sampled under this rollout's name is meant, in the place of the choices.
    rollout: str = ""
    initial_policy_version: int | None = None
    final_policy_version: int | None = None
    metrics: Metrics = {}
    metadata: Metadata = {}
    logs: list[str] = []
    start_time: datetime = Field(default_factory=datetime.now, exclude=True)

    def log(self, message: str) -> None:
        """Keep a line with the trajectory."""
        self.logs.append(message)

    def finish(self) -> Self:
        """Note in `metrics` how long it took."""
        self.metrics["duration"] = (datetime.now() - self.start_time).total_seconds()
        return self

    def track_duration(self, name: str) -> _Span:
        """`with` or `async with`: how long the block takes is added to `metrics["NAME_duration"]`."""
        return _Span(self.metrics, f"{name}_duration")

    def for_logging(self) -> dict[str, Any]:
        """The trajectory as plain JSON; each message is marked if it is an answer."""
        return {
            "reward": self.reward,
            "initial_policy_version": self.initial_policy_version,
            "final_policy_version": self.final_policy_version,
            "metrics": self.metrics,
            "metadata": self.metadata,
            "messages": [
                message_of(entry) | {"trainable": is_choice(entry)} for entry in self.messages_and_choices
            ],
            "tools": self.tools,
            "logs": self.logs,
        }

    def __str__(self) -> str:
        return f"Trajectory(reward={self.reward}, metrics={self.metrics}, metadata={self.metadata})"


class _Span:
    """A stretch of time that a metric adds up."""

    def __init__(self, metrics: Metrics, name: str) -> None:
        self._metrics = metrics
        self._name = name
        self._began = 0.0

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        passed = time.monotonic() - self._began
        self._metrics[self._name] = self._metrics.get(self._name, 0.0) + passed

    async def __aenter__(self) -> None:
        self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)


def message_of(entry: Any) -> dict[str, Any]:
    """An entry of a history as the message that the next request sends: text, and calls of tools if any."""
    if not is_choice(entry):
        return {**_plain(entry), "content": get_field(entry, "content") or ""}
    message = get_field(entry, "message")
    sent: dict[str, Any] = {"role": "assistant", "content": get_field(message, "content") or ""}
    if calls := get_field(message, "tool_calls"):
        sent["tool_calls"] = [_plain(call) for call in calls]
    return sent


def _plain(thing: Any) -> dict[str, Any]:
    """An object of an SDK, or a value that is JSON already."""
    if isinstance(thing, Mapping):
        return dict(thing)
    return thing.model_dump(mode="json")
