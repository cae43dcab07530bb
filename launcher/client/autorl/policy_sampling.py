"""Inputs answered by the run's policy with a task as its system prompt: to be trained on, or to be compared.

Neighbours: `from_task.py` has the inputs, `launcher/client/wire.py` carries the requests. Knows nothing of
judges.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from launcher.client.answers import parse_json, refused_error
from launcher.client.request_bodies import PURPOSE_HEADER, ROLLOUT_HEADER
from launcher.client.session import Session
from launcher.client.trajectories.trajectory import Trajectory, message_of
from launcher.client.wire import AsyncWire

_PATH = "/v1/chat/completions"


class PolicySampler:
    """At most `at_once` requests at the same time."""

    def __init__(self, run: Session, task: str, at_once: int) -> None:
        self._run = run
        self._task = task
        self._wire = AsyncWire(run.endpoint, run.patience)
        self._semaphore = asyncio.Semaphore(at_once)

    async def rollout(self, scenario: str) -> Trajectory:
        """One answer, to be rewarded by its rollout's id."""
        rollout = self._run.new_rollout()
        choice = await self._ask(scenario, {ROLLOUT_HEADER: rollout}, {})
        return Trajectory(messages_and_choices=[*self._messages(scenario), choice], rollout=rollout)

    async def greedy_answers(self, scenarios: Sequence[str]) -> list[str]:
        """The likeliest answers of the policy as it is now; nothing of it can be trained."""
        requests = (self._ask(one, {PURPOSE_HEADER: "eval"}, {"temperature": 0}) for one in scenarios)
        return [message_of(choice)["content"] for choice in await asyncio.gather(*requests)]

    def _messages(self, scenario: str) -> list[dict[str, Any]]:
        return [{"role": "system", "content": self._task}, {"role": "user", "content": scenario}]

    async def _ask(self, scenario: str, tags: dict[str, str], more: dict[str, Any]) -> dict[str, Any]:
        async with self._semaphore:
            model = await asyncio.to_thread(lambda: self._run.model)
            body = {"model": model, "messages": self._messages(scenario), **more}
            headers = {"content-type": "application/json", **tags}
            response = await self._wire.send("POST", _PATH, json.dumps(body).encode(), headers)
        if response.is_error:
            raise refused_error("POST", _PATH, response)
        return parse_json(response)["choices"][0]
