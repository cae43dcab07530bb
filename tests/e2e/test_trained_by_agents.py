"""The installed OpenAI Agents SDK on a real engine and trainer, in the shared run (B4)."""

from __future__ import annotations

import json

import pytest

from launcher.client import connect
from tests.support.agent_world import said_by
from tests.support.foreign_environments import AGENTS
from tests.support.launched import Launched
from tests.support.step_tokens import trained_tokens

pytestmark = pytest.mark.slow


def test_b04_an_agent_with_strict_tools_trains_the_policy_on_the_ids_that_the_engine_sampled(
    pupil: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAUNCH_HOME", str(pupil.home))
    run = connect("shared")
    before = run.version
    # Not those that stream: there the SDK takes an answer that was cut off for an error of the model.
    agents = ("agents", "one", "responses", "stored")
    said = said_by(AGENTS, "agents_rollouts.py", *agents, base_url=run.base_url, api_key=run.api_key)
    assert said["strict"] and run.version == before + len(agents)
    machine = pupil.home / "runs" / run.run_id / "machine"  # a newer run may be beside it
    lines = [json.loads(line) for file in machine.glob("samples/*.jsonl") for line in file.open()]
    sampled = {sample["id"]: sample["completion_ids"] for line in lines for sample in line.get("samples", ())}
    for agent in (said[name] for name in agents):
        counts, names = agent["counts"], agent["rollouts"]
        assert agent["requests"] == [1] * len(names)  # the tiny model calls no tools
        assert counts["trained"] == counts["samples"] == len(names) and not counts["dropped"]
        trained = trained_tokens(machine, names)
        assert trained and trained == [token for (name,) in agent["samples"] for token in sampled[name]]
