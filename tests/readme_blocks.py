"""The help texts in the READMEs: `python -m tests.readme_blocks --write` brings them up to date.

A block is fenced with ```text and stands below a line `<!-- help: launch --help -->`.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys

from tests.support import readmes

_BLOCK = re.compile(r"(<!-- help: launch(?P<words>[^>]*) -->\n+```text\n)(?P<text>|.*?\n)(```\n)", re.DOTALL)


def real_help(words: str) -> str:
    """What `launch WORDS` prints."""
    from launcher.cli.main import main

    with contextlib.redirect_stdout(io.StringIO()) as out:
        main(shlex.split(words))
    return out.getvalue().strip("\n")


def blocks() -> dict[str, str]:
    """Command → the text that a README shows for it."""
    texts = [readme.read_text() for readme in readmes.every()]
    return {
        found["words"].strip(): found["text"].rstrip("\n")
        for text in texts
        for found in _BLOCK.finditer(text)
    }


def updated(text: str) -> str:
    """A README with the real texts."""
    return _BLOCK.sub(lambda found: f"{found[1]}{real_help(found['words'])}\n{found[4]}", text)


if __name__ == "__main__":
    sys.exit(readmes.bring(updated))
