"""The failures of a judge.

Neighbours: the judges raise the first three, `judge_retries.py` asks again or gives up with JudgeFailed.
Knows nothing of what is judged.

    RetryableError          no answer, and there may be one later
    Declined        this question is not answered, however often it is asked
    AnswerUnusable  an answer that cannot be read as what was asked for

    ClientError
    ├── JudgeFailed     all tries failed: the texts it should have judged are left out
    └── JudgeUnusable   no question will be answered: a wrong key, a name that nobody has
"""

# ruff: noqa: N818 - these names say what happened
from __future__ import annotations

from launcher.client.failures import ClientError
from launcher.client.ruler.judge_usage import Usage


class RetryableError(Exception):
    """Ask again; not before `seconds`, where the judge has said so."""

    def __init__(self, why: str, seconds: float | None = None) -> None:
        super().__init__(why)
        self.seconds = seconds


class Declined(Exception):
    """It does not answer this: a policy about content, a text that is too long."""


class AnswerUnusable(Exception):
    """Why it is none. The text may be told to the judge, so nothing of its answer is in it."""

    def __init__(self, why: str, usage: Usage | None = None) -> None:
        super().__init__(why)
        self.usage = usage or Usage()


class JudgeFailed(ClientError):
    """No usable answer in all tries. `usage` is what they took."""

    exit_code = 6

    def __init__(self, message: str, usage: Usage, why: str | None = None, hint: str | None = None) -> None:
        super().__init__(message, why, hint)
        self.usage = usage


class JudgeUnusable(ClientError):
    """It would answer no question at all, so nothing is gained by leaving out what it should have judged."""

    exit_code = 3
