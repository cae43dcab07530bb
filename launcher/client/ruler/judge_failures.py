"""The failures of a judge.

Neighbours: the judges raise the first three, `judge_retries.py` asks again or gives up with JudgeFailed.
Knows nothing of the judged texts.

    RetryableError          no answer, and there may be one later
    Declined        this question is not answered by any retry
    AnswerUnusable  an answer that cannot be read in the requested form

    ClientError
    ├── JudgeFailed     all tries failed: the texts it should have judged are left out
    └── JudgeUnusable   no question will be answered: a wrong key, an unknown name
"""

# ruff: noqa: N818 - these names are events
from __future__ import annotations

from launcher.client.failures import ClientError
from launcher.client.ruler.judge_usage import Usage


class RetryableError(Exception):
    """Ask again; not before `seconds`, if the judge has set a time."""

    def __init__(self, why: str, seconds: float | None = None) -> None:
        super().__init__(why)
        self.seconds = seconds


class Declined(Exception):
    """The judge does not answer this question: a policy about content, a text that is too long."""


class AnswerUnusable(Exception):
    """The reason why the answer is unusable. The text may be sent to the judge, so it quotes nothing of the
    answer."""

    def __init__(self, why: str, usage: Usage | None = None) -> None:
        super().__init__(why)
        self.usage = usage or Usage()


class JudgeFailed(ClientError):
    """No usable answer in all tries. `usage` is that of all tries."""

    exit_code = 6

    def __init__(self, message: str, usage: Usage, why: str | None = None, hint: str | None = None) -> None:
        super().__init__(message, why, hint)
        self.usage = usage


class JudgeUnusable(ClientError):
    """The judge would answer no question at all, so leaving out the texts would gain nothing."""

    exit_code = 3
