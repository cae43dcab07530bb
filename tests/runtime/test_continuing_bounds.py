"""Where a turn is not to go on from earlier ids, or has little room to: limits and stops of its client's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.runtime.test_continuing import ASKED, MORE, Talk, ids, said
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
