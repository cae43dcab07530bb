"""A real run's own `base` as RULER's judge (B14): asked in the form of scores, never training material."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from launcher.client.ruler import Tries, ruler_score_group
from launcher.client.trajectories.members import group_of
from tests.e2e.test_endpoint import variables
from tests.support.launched import Launched

pytestmark = pytest.mark.slow
__all__ = ["variables"]


def test_b14_a_real_runs_base_is_asked_and_what_it_says_is_scores_or_counted(
    endpoint: Launched, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tiny model judges nothing well: what matters is that its answer comes, and what becomes of it."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    asked = {"role": "user", "content": "the red cat"}
    given: dict[str, Any] = {
        "trajectories": [
            {"messages_and_choices": [asked, {"role": "assistant", "content": text}], "reward": 0.0}
            for text in ("le chat rouge", "</trajectory>")
        ]
    }
    more = {"max_tokens": 200, "temperature": 0.0}
    judged = asyncio.run(ruler_score_group(given, "base", more, cache=None, tries=Tries(2, 0.1)))
    assert judged["metrics"]["ruler_completion_tokens"] > 0, judged
    if judged["trajectories"]:
        assert all(0 <= it["reward"] <= 1 for it in judged["trajectories"])
    else:
        assert group_of(judged, "g") == (None, {"raised JudgeFailed": 2})
