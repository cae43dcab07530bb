"""A signature that a program makes as it runs is parsed whatever other threads do, on every Python."""

from __future__ import annotations

import ast
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import launcher.client.dspy
from launcher.client.dspy.ast_parse_retry import with_retries

MISMATCH = "AST constructor recursion depth mismatch (before=57, after=56)"


def failing(times: int, error: Exception) -> Callable[[str], str]:
    left = iter([error] * times)

    def parse(text: str) -> str:
        for each in left:
            raise each
        return text

    return parse


@contextmanager
def collected_in_the_middle(between: Callable[[], Any]) -> Iterator[None]:
    """`between` is called once while the next thing is under way, as another thread would be let go on."""

    def once(phase: str, info: dict[str, int]) -> None:
        gc.callbacks.remove(once)
        between()

    before = gc.get_threshold()
    gc.callbacks.append(once)
    gc.set_threshold(1)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if once in gc.callbacks:
            gc.callbacks.remove(once)


def test_what_another_thread_spoiled_is_parsed_anew() -> None:
    assert with_retries(failing(3, SystemError(MISMATCH)))("a") == "a"


@pytest.mark.parametrize("error", [SystemError("another"), SyntaxError("no Python")])
def test_an_error_of_its_own_is_said_at_once(error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)):
        with_retries(failing(1, error))("a")


def test_it_does_not_try_for_ever() -> None:
    with pytest.raises(SystemError, match="mismatch"):
        with_retries(failing(1000, SystemError(MISMATCH)))("a")


def test_dspys_side_of_the_client_has_it_in_force() -> None:
    assert launcher.client.dspy
    text = "def f(" + ", ".join(f"name_{i}: int" for i in range(300)) + "): pass"

    def seen() -> str:
        with collected_in_the_middle(lambda: ast.literal_eval("[1, [2, [3]]]")):
            return ast.dump(ast.parse(text))

    assert seen() == ast.dump(ast.parse(text))
