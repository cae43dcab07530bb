"""Asks the user before money is spent or something is removed.

Neighbours: `price_agreement.py` asks before GPUs are rented, `teardown_verbs.py` before `gc` removes,
`rented_run.py` once and for all whether plain ssh may find runs. Without a terminal there is never a
question.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

from launcher.base import atomic
from launcher.console.output import Output

_ANSWERS = "answers.json"


def is_interactive() -> bool:
    """Whether there is a user at a terminal who could answer a question."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def can_prompt(output: Output) -> bool:
    """With `--json` a program is reading, which answers no questions."""
    return not output.as_json and is_interactive()


def confirm(output: Output, question: str) -> bool:
    """The answer; no without one."""
    output.note(f"{question} [y/N]")
    return sys.stdin.readline().strip().lower() in {"y", "yes"}


def remembered_answer(data: Path, question: str) -> bool | None:
    """The stored answer to `question`; None if it was never asked. `data` is the home's folder."""
    try:
        answer = json.loads((data / _ANSWERS).read_text()).get(question)
    except (OSError, ValueError, AttributeError):
        return None
    return answer if isinstance(answer, bool) else None


def remember_answer(data: Path, question: str, answer: bool) -> None:
    """Store an answer. If it cannot be written, the question will be asked again."""
    with contextlib.suppress(OSError):
        data.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = data / _ANSWERS
        try:
            answers = json.loads(path.read_text())
        except (OSError, ValueError):
            answers = {}
        atomic.write(path, json.dumps({**answers, question: answer}, indent=1) + "\n")
