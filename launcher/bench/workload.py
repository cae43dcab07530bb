"""The workload of a bench: steps, seeds, settings.

Neighbours: the programs read it from a task file. Knows nothing of processes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TASK = Path(__file__).with_name("task.json")

# A step's: so many inputs, so many answers to each, and the most tokens of an answer.
EXAMPLES, ROLLOUTS, ANSWER_TOKENS = 8, 8, 64
LEARNING_RATE, RANK, ALPHA = 2e-3, 16, 16
# The number of steps of a record, and the first step whose time counts: those before it warm up.
STEPS, FIRST_STEP = 40, 6


@dataclass(frozen=True)
class Workload:
    """One bench as requested. `staleness` None: our optimizer's default."""

    steps: int = STEPS
    seeds: int = 1
    staleness: int | None = None

    def task(self, seed: int, model: Path) -> dict[str, Any]:
        """The task file's content for one run."""
        return {
            **json.loads(_TASK.read_text(encoding="utf-8")),
            "model": str(model),
            "seed": seed,
            "steps": self.steps,
            "examples": EXAMPLES,
            "rollouts": ROLLOUTS,
            "answer_tokens": ANSWER_TOKENS,
            "learning_rate": LEARNING_RATE,
            "rank": RANK,
            "alpha": ALPHA,
            "staleness": self.staleness,
            "requests": None,
        }

    @property
    def first_step(self) -> int:
        """The first step whose time counts; a short run has a shorter warm-up."""
        return min(FIRST_STEP, self.steps)

    def to_dict(self) -> dict[str, Any]:
        """The workload as it stands in the result."""
        return {
            "steps": self.steps,
            "seeds": self.seeds,
            "rollouts_a_step": EXAMPLES * ROLLOUTS,
            "answer_tokens": ANSWER_TOKENS,
            "learning_rate": LEARNING_RATE,
            "lora": {"rank": RANK, "alpha": ALPHA},
            "model": "tiny",
            "reward": "different letters of the answer; cut off or without its field: -1",
        }
