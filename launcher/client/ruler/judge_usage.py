"""The usage of a judge: requests, tokens and, if the judge's prices are known, dollars.

Neighbours: the judges count one answer, `judge_retries.py` adds them up, `score_group.py` keeps the sum with
the group. Knows nothing of the questions.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Usage:
    """`cost` in dollars; None if any of it has no known price."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float | None = 0.0

    def __add__(self, other: Usage) -> Usage:
        cost = None if self.cost is None or other.cost is None else self.cost + other.cost
        return Usage(
            self.requests + other.requests,
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            cost,
        )
