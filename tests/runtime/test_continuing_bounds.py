"""Where a turn is not to go on from earlier ids, or has little room: limits and stops of its client's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runtime.gateway.completions.not_trainable import TrainabilityCheck
from runtime.gateway.engines.engine_client import EngineFacts
from runtime.gateway.http.warnings import Warnings
from tests.runtime.recorded import asked
from tests.runtime.test_continuing import ASKED, MORE, THOUGHT, Talk, ids, said
from tests.runtime.test_turns import EOS, THINKING

LINE = "<think>a cat</think>le chat"


@pytest.mark.parametrize("stops", [{"stop": ["\n"]}, {"stop": "\n"}, {"stop_token_ids": ids("\n")}])
def test_joined_not_by_a_line_end_that_stopped_the_answer(tmp_path: Path, stops: dict[str, Any]) -> None:
    """The template ends a message with a line's end too, but behind a token that was never sampled here."""
    talk = Talk(tmp_path, THINKING, **stops)
    talk.say([ASKED], LINE, end=ids("\n"))
    turn = talk.say([ASKED, said(LINE), MORE], "le chien")
    assert turn.fields is None
    assert turn.conversation.apart == "the template does not end an answer as it ended"


def test_joined_after_an_answer_that_no_stop_ended(tmp_path: Path) -> None:
    talk = Talk(tmp_path, THINKING, stop=["\n"])
    talk.say([ASKED], LINE, end=[EOS])
    so_far = talk.prompt + talk.completion
    assert talk.say([ASKED, said(LINE), MORE], "le chien").conversation.continues == talk.samples[0]
    assert talk.prompt[: len(so_far)] == so_far


def second(folder: Path, context: int, **limits: Any) -> str | None:
    """Why the second turn of a talk is apart, of an engine with this context."""
    talk = Talk(folder, THINKING, **limits)
    talk.engine.facts = EngineFacts(context_length=context)
    talk.say([ASKED], THOUGHT)
    return talk.say([ASKED, said(THOUGHT), MORE], "le chien").conversation.apart


def test_joined_where_an_answer_may_be_as_long_as_the_context(tmp_path: Path) -> None:
    """A chat that names no limit has the run's, which a short context is no longer than (answer_limit.py)."""
    assert second(tmp_path / "a", 512, max_tokens=512) is None
    assert second(tmp_path / "b", 512, max_completion_tokens=512) is None
    assert second(tmp_path / "c", 512, max_tokens=400) is None
    assert second(tmp_path / "d", 70, max_tokens=70) == "too long for the context", "thoughts fill it"
    assert second(tmp_path / "e", 90, max_tokens=45) == "too long for the context", "it would have had 45"


def test_joined_limits_that_are_no_numbers_are_the_engines_to_refuse(tmp_path: Path) -> None:
    assert second(tmp_path, 512, max_tokens="40") is None


@pytest.mark.parametrize("temperature", ["warm", [1], {}])
def test_b06_a_temperature_that_is_no_number_is_refused_as_one(temperature: Any) -> None:
    """By the check of fields, a 400: what cannot be trained is asked about before that."""
    for told in ({}, {"x_slipway_untrainable": "refuse"}):
        request = asked(rollout="r", temperature=temperature, **told)
        assert TrainabilityCheck(Warnings()).check(request) is None
