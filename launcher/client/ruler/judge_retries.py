"""One question to a judge, asked until its answer can be read, and only so often.

Neighbours: a judge (`judges.py`) answers, `judge_answer.py` and the scenarios' reader decide whether its
answer can be used. Knows nothing of the judged texts or of the clock.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from launcher.client.ruler.judge_failures import AnswerUnusable, Declined, JudgeFailed, RetryableError
from launcher.client.ruler.judge_protocol import Judge, Messages
from launcher.client.ruler.judge_usage import Usage

_Read = TypeVar("_Read")


@dataclass(frozen=True)
class Tries:
    """A judge's retry policy: at most `most` requests for one question, with pauses that double; a judge may
    ask for longer ones."""

    most: int = 5
    first_pause_seconds: float = 1.0
    longest_pause_seconds: float = 60.0
    answer_seconds: float = 600.0
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

    def pause_after(self, attempt: int, retry_after_seconds: float | None) -> float:
        """Seconds to wait after this try, the first is 0. Those that failed together come back apart."""
        pause = self.first_pause_seconds * 2**attempt * (1 + random.random() / 4)
        return min(max(pause, retry_after_seconds or 0.0), self.longest_pause_seconds)


async def ask_with_retries(
    judge: Judge,
    messages: Messages,
    form: Mapping[str, Any],
    parse: Callable[[str], _Read],
    tries: Tries,
) -> tuple[_Read, Usage]:
    """The parsed answer, and the usage of all tries.

    `parse` raises AnswerUnusable, whose text goes to the judge with the next try: without it, a judge at
    temperature 0 would give the same answer again. Raises JudgeFailed after the last, JudgeUnusable at once.
    """
    usage = Usage()
    reasons: list[str] = []
    problem: str | None = None
    for attempt in range(tries.most):
        retry_after_seconds = None
        try:
            answer = await asyncio.wait_for(
                judge.ask(_with_feedback(messages, problem), form, tries.answer_seconds), tries.answer_seconds
            )
            usage += answer.usage
            return parse(answer.text), usage
        except AnswerUnusable as error:
            usage += error.usage
            problem = str(error)
            reasons.append(problem)
        except RetryableError as error:
            usage += Usage(1)
            retry_after_seconds = error.seconds
            reasons.append(str(error))
        except TimeoutError:  # it may be at work on it all the same, for money
            usage += Usage(1, cost=None)
            reasons.append(f"no answer within {tries.answer_seconds:g} s")
        except Declined as error:
            usage += Usage(1)
            reasons.append(str(error))
            break
        if attempt + 1 < tries.most:
            await tries.sleep(tries.pause_after(attempt, retry_after_seconds))
    count = "1 try" if len(reasons) == 1 else f"{len(reasons)} tries"
    raise JudgeFailed(
        f"The judge {judge.name} gave no usable answer in {count}", usage, "; ".join(dict.fromkeys(reasons))
    )


def _with_feedback(messages: Messages, problem: str | None) -> Messages:
    if problem is None:
        return messages
    *before, last = messages
    content = f"{last['content']}\n\nAn earlier answer of yours could not be used: {problem}."
    return [*before, {**last, "content": content}]
