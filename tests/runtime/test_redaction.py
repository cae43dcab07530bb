"""What looks like a secret is hidden, however long the text is that it stands in."""

from __future__ import annotations

import time

import pytest

from runtime.shared.redaction import hide

TOKEN = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NSJ9.SflKxwRJSMeKKF2QT4fwpMeJf36POk6yJV"
# Of the processor, for what takes milliseconds; the square of such a length takes many times as much.
CPU_SECONDS = 1.0


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        (f"session-{TOKEN}", "session-***"),
        (f"eyJ-{TOKEN} and {TOKEN}", "*** and ***"),
        (f"cookie.{TOKEN}.{TOKEN}", "cookie.***.***"),
        (f"eyJshort.{TOKEN}", "eyJshort.***"),
        (f"x{TOKEN}", f"x{TOKEN}"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NSJ9", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NSJ9"),
    ],
)
def test_g14_a_web_token_is_hidden_wherever_in_its_word_it_begins(text: str, hidden: str) -> None:
    assert hide(text) == hidden


@pytest.mark.parametrize(
    "text",
    ["eyJ-" * 60_000, "eyJ-" * 60_000 + f".{TOKEN}", "eyJaaaaaaaaaa." * 20_000],
    ids=["one word", "before a token", "of many parts"],
)
def test_g23_a_long_word_in_which_tokens_could_begin_is_read_once(text: str) -> None:
    """A policy that rambles so, or a hostile tool, would hold up the step that is written down."""
    begun = time.process_time()
    hide(text)
    assert time.process_time() - begun < CPU_SECONDS
