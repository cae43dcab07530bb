"""The help texts in README.md: `python -m tests.readme_blocks --write` brings them up to date.

A block is fenced with ```text and stands below a line `<!-- help: launch --help -->`.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"
_BLOCK = re.compile(r"(<!-- help: launch(?P<words>[^>]*) -->\n+```text\n)(?P<text>|.*?\n)(```\n)", re.DOTALL)


def real_help(words: str) -> str:
    """What `launch WORDS` prints."""
    from launcher.cli.main import main

    with contextlib.redirect_stdout(io.StringIO()) as out:
        main(shlex.split(words))
    return out.getvalue().strip("\n")


def blocks(text: str) -> dict[str, str]:
    """Command → the text the README shows for it."""
    return {match["words"].strip(): match["text"].rstrip("\n") for match in _BLOCK.finditer(text)}


def updated(text: str) -> str:
    """The README with the real texts."""
    return _BLOCK.sub(lambda match: f"{match[1]}{real_help(match['words'])}\n{match[4]}", text)


if __name__ == "__main__":
    before = README.read_text()
    after = updated(before)
    if "--write" in sys.argv:
        README.write_text(after)
    sys.exit(0 if "--write" in sys.argv or before == after else "README.md is behind: --write")
