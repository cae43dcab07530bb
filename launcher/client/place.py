"""Where an optimizer is in its work: what rides on each step as client_state, and comes back after a restart.

Neighbours: `training.py` moves it on; the runtime keeps it with the checkpoint and gives it back through
`connect()`. Plain JSON, far below its 64 KiB. Knows nothing of programs or of the wire.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

_SCHEMA = 1
_BY = "slipway.GRPO"
_SCORES_KEPT = 400


@dataclass(frozen=True)
class Validated:
    """One validation: after how many steps, how good, and the checkpoint that holds that policy, if any."""

    step: int
    score: float
    parse_rate: float
    checkpoint: str | None = None


@dataclass
class Place:
    """`step` is how many steps are done; `compile` counts a program's optimizers from 0.

    `superseded`: a later optimizer of the same program has trained since, so this one had finished.
    """

    fingerprint: str
    seed: int
    compile: int = 0
    step: int = 0
    scores: list[Validated] = field(default_factory=list)
    best: Validated | None = None
    restored: str | None = None
    superseded: bool = False

    def validated(self, step: int) -> Validated | None:
        """The validation after `step` steps, if it was done."""
        return next((it for it in self.scores if it.step == step), None)

    def add(self, validated: Validated) -> bool:
        """Note a validation; whether it is the best so far."""
        self.scores.append(validated)
        if len(self.scores) > _SCORES_KEPT:
            del self.scores[1]  # the first is the start
        if self.best is not None and validated.score <= self.best.score:
            return False
        self.best = validated
        return True

    def client_state(self, step: int) -> dict[str, Any]:
        """The place once `step` steps are done, as JSON."""
        return {
            "schema": _SCHEMA,
            "by": _BY,
            "fingerprint": self.fingerprint,
            "seed": self.seed,
            "compile": self.compile,
            "step": step,
            "scores": [asdict(it) for it in self.scores],
            "best": asdict(self.best) if self.best else None,
            "restored": self.restored,
        }

    def resumed(self, state: dict[str, Any] | None) -> Place | None:
        """This place moved on to where `state` says, or None when it is about another optimizer's work."""
        if not state or state.get("by") != _BY or state.get("schema") != _SCHEMA:
            return None
        if state["compile"] > self.compile:
            return replace(self, superseded=True)
        if (state["compile"], state["fingerprint"]) != (self.compile, self.fingerprint):
            return None
        return replace(
            self,
            step=state["step"],
            scores=[Validated(**it) for it in state["scores"]],
            best=Validated(**state["best"]) if state["best"] else None,
            restored=state["restored"],
        )

    def rewound(self, state: dict[str, Any] | None) -> Place:
        """This place taken back to where `state` says, to its beginning when that is nothing of its own."""
        return self.resumed(state) or replace(self, step=0, scores=[], best=None, restored=None)


def fingerprint(predictors: Sequence[str], examples: int, seed: int, per_step: int, rollouts: int) -> str:
    """Tells one optimizer's work from another's: its predictors, its data's size, how it samples."""
    text = json.dumps([list(predictors), examples, seed, per_step, rollouts])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
