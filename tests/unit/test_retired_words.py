"""The words that the house no longer uses stay out: `retired_words.toml` has them, with the new one beside
each.

An identifier is a NAME token of Python; strings and comments are free, for names on disk and on the wire stay
as they are. A phrase is looked for in the documents.
"""

from __future__ import annotations

import re
import subprocess
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RETIRED: dict[str, dict[str, str]] = tomllib.loads(
    Path(__file__).with_name("retired_words.toml").read_text(encoding="utf-8")
)
HALVES = ("launcher", "runtime")


def _tracked(pattern: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--", pattern], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return [path for name in listed.stdout.splitlines() if (path := ROOT / name).is_file()]


def _names(path: Path) -> Iterator[tuple[str, int]]:
    """Each name in a file's code, with its line."""
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.NAME:
                yield token.string, token.start[0]


def _retired(path: Path, words: dict[str, str]) -> list[str]:
    if not words:
        return []
    pattern = re.compile("|".join(f"(?:{word})" for word in words))
    return [
        f"{path.name}:{line}: {name}; say {_instead(name, words)}"
        for name, line in _names(path)
        if pattern.fullmatch(name)
    ]


def _instead(name: str, words: dict[str, str]) -> str:
    return next(new for old, new in words.items() if re.fullmatch(old, name))


@pytest.mark.process
@pytest.mark.parametrize("half", HALVES)
def test_no_retired_word_is_a_name_in_the_code(half: str) -> None:
    words = RETIRED[half] | RETIRED["both"]
    assert not [found for path in _tracked(f"{half}/*.py") for found in _retired(path, words)]


def test_no_retired_phrase_stands_in_a_document() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {old}; say {new}"
        for path in _tracked("*.md")
        for old, new in RETIRED["phrases"].items()
        if re.search(rf"\b(?:{old})\b", path.read_text(encoding="utf-8"))
    ]
    assert not found


def test_a_retired_name_is_seen_in_code_and_not_in_a_string(tmp_path: Path) -> None:
    file = tmp_path / "some.py"
    file.write_text('"""Passing."""\n\n\ndef passing() -> str:\n    return "passing"  # passing\n')
    assert _retired(file, {"passing|passed": "failpoint"}) == ["some.py:4: passing; say failpoint"]
