"""RULER with other people's packages as installed: LiteLLM's names, openpipe-art's groups (B14)."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

from launcher.client.ruler import JudgeUnusable
from launcher.client.trajectories.members import group_of
from tests.support.environment import REPOSITORY
from tests.support.foreign_environments import ART, python_with
from tests.support.played_judge import KEY, JudgeAsked, fair_text, played_judge
from tests.unit.test_ruler import WORTH, Pauses, of_worth, rewards, score

PROGRAM = REPOSITORY / "tests" / "programs" / "foreign" / "ruler_groups.py"


@pytest.mark.process
def test_b14_litellms_names_are_asked_through_it_and_its_prices_counted() -> None:
    with played_judge() as judge:
        more = {"api_base": judge.url, "api_key": KEY, "temperature": 0.0}
        prices = {"input_cost_per_token": 1e-3, "output_cost_per_token": 1e-2}
        scored = score(of_worth(), "openai/played-judge", extra_litellm_params=more | prices)
    (asked,) = judge.asked
    assert rewards(scored) == WORTH
    assert (asked.body["temperature"], asked.headers["authorization"]) == (0.0, f"Bearer {KEY}")
    assert scored["metrics"]["ruler_cost"] == pytest.approx(100 * 1e-3 + 10 * 1e-2)
    assert not [name for name in asked.headers if name.startswith("x-slipway")]


@pytest.mark.process
def test_b14_what_litellm_raises_is_asked_again_or_said() -> None:
    limits = [lambda asked: (429, '{"error": {"message": "slow down"}}', {})] * 2
    pauses = Pauses()
    with played_judge(says_first=[*limits]) as judge:
        more = {"api_base": judge.url, "api_key": KEY}
        scored = score(of_worth(), "openai/played-judge", extra_litellm_params=more, tries=pauses.tries())
        assert rewards(scored) == WORTH
        assert len(judge.asked) == 3
        assert len(pauses.seconds) == 2
        judge.says = lambda asked: (429, '{"error": {"message": "slow down"}}', {})
        left_out = score(of_worth(), "openai/played-judge", extra_litellm_params=more)
        assert group_of(left_out, "g") == (None, {"raised JudgeFailed": 8})
        assert len(judge.asked) == 6
        judge.says = lambda asked: (401, '{"error": {"message": "no such key"}}', {})
        with pytest.raises(JudgeUnusable):
            score(of_worth(), "openai/played-judge", extra_litellm_params=more)
        assert len(judge.asked) == 7
    with pytest.raises(JudgeUnusable) as raised:
        score(of_worth(), "nobody-knows-whose")
    assert "openai/o3" in str(raised.value.hint)


def says(asked: JudgeAsked) -> str:
    return "" if asked.body["model"] == "silent" else fair_text(asked)


@pytest.mark.slow
def test_b14_groups_of_openpipe_art_as_installed_are_scored_and_counted() -> None:
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    with played_judge(says) as judge:
        command = [python_with(ART), PROGRAM, judge.url, KEY]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    given, scored, left_out = found["given"], found["scored"], found["left_out"]
    assert given["type"] == scored["type"] == left_out["type"]
    assert (given["rewards"], given["metrics"]) == ([0.5] * 3, [{"turns": 1}] * 3)
    assert scored["rewards"] == [0.25, 1.0, 0.25]
    assert scored["metrics"][1] == {"turns": 1, "independent_reward": 0.5, "ruler_score": 1.0}
    assert scored["metadata"] == given["metadata"]
    assert scored["members"] == [[["a"], 0.25], [["b"], 1.0], [["c"], 0.25]]
    assert scored["dropped"] == {"raised ValueError": 1}
    assert (left_out["rewards"], left_out["members"]) == ([], None)
    assert left_out["dropped"] == {"raised ValueError": 1, "raised JudgeFailed": 3}
    assert scored["own"]["metadata"] == {"ruler_judge": "played-judge"}
    assert scored["own"]["metrics"]["ruler_requests"] == 1
