"""An optimizer's place in its work: it rides on each step as client_state, and comes back after a restart.

Neighbours: `training.py` moves it on; the runtime keeps it with the checkpoint and gives it back through
`connect()`; `score_comparison.py` compares validations. Plain JSON, below its 64 KiB. Knows nothing of
programs or of the wire.

A place is taken up by the same compile only: after a rewind in the process it began in, after a restart in
the program that `launch --resume` started again (`PROGRAM_VARIABLE`), or if the user asks for it.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeGuard

from launcher.client.dspy.score_comparison import Scores, is_comparable, mean_gain
from launcher.client.dspy.step_keys import Key, cursor_of, cursor_state
from launcher.client.scheduler import Cursor

PROGRAM_VARIABLE = "LAUNCH_PROGRAM"
"""The variable that `launch` sets for the program it starts: the run, the step it was resumed after, and
a word drawn for this life (`slip-0a1b2c3d@12.9f8e7d6c`; 0 in its first life). The step alone does not tell
lives apart: one that is killed while its first step trains leaves that step to be committed in the next."""

_SCHEMA = 2
_BY = "slipway.GRPO"
_OTHER_VERSION = "made by a different version of launch, and cannot be read here"
_SCORES_KEPT = 200
_BY_RUN = "as the run has it"
# Of a larger validation set only so many examples are compared after a restart: more would not fit.
_EXAMPLES_KEPT = 2000

Metrics = Mapping[str, float]


@dataclass(frozen=True)
class OptimizerWork:
    """The identity of an optimizer's work: its program, its data, and how it samples."""

    program: str
    metric: str
    predictors: tuple[str, ...]
    examples: int
    seed: int
    examples_per_step: int
    rollouts: int

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON has it."""
        return asdict(self) | {"predictors": list(self.predictors)}

    @property
    def digest(self) -> str:
        """A short name of it."""
        return hashlib.sha256(json.dumps(self.to_dict()).encode()).hexdigest()[:16]

    def differences(self, other: dict[str, Any]) -> list[str]:
        """The difference between two works, in words: `examples 12 -> 240`."""
        mine = self.to_dict()
        return [
            f"{name} {other.get(name)!r} -> {mine[name]!r}" for name in mine if other.get(name) != mine[name]
        ]


@dataclass(frozen=True)
class Validated:
    """One validation: after how many steps, how good, and the checkpoint that holds that policy, if any."""

    step: int
    score: float
    parse_rate: float
    checkpoint: str | None = None


@dataclass(frozen=True)
class PendingValidation:
    """A validation in progress: of the policy after so many steps, by its version and its weights' hash."""

    step: int
    version: int
    weights: str | None


@dataclass
class Place:
    """`step` is the number of steps done; `compile` counts a program's optimizers from 0.

    `earlier`: the digests of the optimizers before it. `names`: the names of their versions. `life`: the
    value of `PROGRAM_VARIABLE`. `best_scores` has the best validation's score on each example, None if it has
    none. `held_out` is the digest of the validation set. `trained`: whether a step of it has taught anything,
    in earlier lives too. `superseded`: a later optimizer of the same program has trained since, so this one
    had finished; `made` is the version that it had made, by its name, if known. `settings`: its steps'
    settings that differ from the run's. `outstanding`: the groups to roll out first, if the examples so far
    do not match the steps so far. `validating`: the validation in progress, if any.
    """

    work: OptimizerWork
    compile: int = 0
    earlier: tuple[str, ...] = ()
    names: tuple[str | None, ...] = ()
    life: str | None = None
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    held_out: str | None = None
    step: int = 0
    trained: bool = False
    scores: list[Validated] = field(default_factory=list)
    best: Validated | None = None
    best_scores: Scores | None = None
    restored: str | None = None
    superseded: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    made: str | None = None
    outstanding: Cursor[Key] | None = None
    validating: PendingValidation | None = None

    def is_over(self, steps: int) -> bool:
        """Whether none of so many steps is left to train."""
        return self.superseded or 0 < steps <= self.step

    # ------------------------------------------------------------- validations

    def validated(self, step: int) -> Validated | None:
        """The validation after `step` steps, if it was done."""
        return next((it for it in self.scores if it.step == step), None)

    def add(self, validated: Validated, scores: Scores) -> bool:
        """Note a validation; whether it is the best so far, by the examples that it and the best scored."""
        self.scores.append(validated)
        if len(self.scores) > _SCORES_KEPT:
            del self.scores[1]  # the first is the start
        if not is_comparable(scores) or (self.best is not None and not self.is_better(scores)):
            return False
        self.best, self.best_scores = validated, scores
        return True

    def is_better(self, scores: Scores) -> bool:
        """Whether these scores are better than the best's, if they can be compared."""
        ahead = self.gain(scores)
        return ahead is not None and ahead > 0

    def gain(self, scores: Scores) -> float | None:
        """How far these scores are above the best's; None if too few examples have both."""
        return mean_gain(scores, self.best_scores) if self.best_scores is not None else None

    # ------------------------------------------------------------- on a step, and back

    def client_state(self, step: int) -> dict[str, Any]:
        """The place once `step` steps are done, as JSON."""
        scores = self.best_scores or []
        # A place without them is as it was before there were any.
        ahead: dict[str, Any] = {} if self.outstanding is None else {"pool": cursor_state(self.outstanding)}
        if self.validating is not None:
            ahead["validating"] = asdict(self.validating)
        return {
            "schema": _SCHEMA,
            "by": _BY,
            "id": self.id,
            "life": self.life,
            "work": self.work.to_dict(),
            "compile": self.compile,
            "earlier": list(self.earlier),
            "names": list(self.names),
            "held_out": self.held_out,
            "step": step,
            "settings": self.settings,
            # By the steps before this one: its own result is not known when it is sent.
            "trained": self.trained,
            "scores": [asdict(it) for it in self.scores],
            "best": asdict(self.best) if self.best else None,
            "best_scores": list(scores[:_EXAMPLES_KEPT]),
            "best_examples": len(scores),
            # A step trained after it makes it a thing of the past.
            "restored": self.restored if step == self.step else None,
            **ahead,
        }

    def restarted(self, state: dict[str, Any] | None, metrics: Metrics) -> Place | None:
        """This place moved on to that of `state`, or None: only an earlier life's place is taken.

        `metrics`: of the step that `state` rode on; here and below.
        """
        if not _is_place_state(state) or not _is_earlier(state["life"], self.life):
            return None
        if self._had_finished(state):
            return self._finished_by(state)
        if state["compile"] != self.compile or self.work.differences(state["work"]):
            return None
        return self._at(state, metrics)

    def resumed(self, state: dict[str, Any] | None, metrics: Metrics) -> Place:
        """This place moved on to that of `state`, whichever program left it. Raises ValueError."""
        if not _is_place_state(state):
            whose = _OTHER_VERSION if _is_of_another_version(state) else "not made by an optimizer"
            raise ValueError(f"the run's last step was {whose}")
        if self._had_finished(state):
            return self._finished_by(state)
        whoever = replace(self.work, program=state["work"].get("program", ""))
        if different := whoever.differences(state["work"]):
            raise ValueError(f"the run's last step is different work: {', '.join(different)}")
        return self._at(state, metrics)

    def rewound(self, state: dict[str, Any] | None, metrics: Metrics) -> Place:
        """This place taken back to that of `state`; to its beginning if `state` is not its own."""
        if _is_place_state(state) and state["id"] == self.id:
            return replace(self._at(state, metrics), settings=self.settings)
        at_first = replace(self, step=0, trained=False, outstanding=None, validating=None, restored=None)
        return replace(at_first, scores=[], best=None, best_scores=None)

    def change_settings(self, settings: dict[str, Any]) -> str | None:
        """Its steps have these settings from here on; in words, where its earlier ones had others."""
        before, self.settings = self.settings, settings
        if not self.step or before == settings:
            return None
        names = [name for name in {**before, **settings} if before.get(name) != settings.get(name)]
        changes = [f"{it} {before.get(it, _BY_RUN)} -> {settings.get(it, _BY_RUN)}" for it in names]
        return f"train_kwargs are not those of the first {self.step} steps: {', '.join(changes)}"

    def why_not_resumed(self, state: dict[str, Any] | None) -> str | None:
        """The reason why a restarted program does not go on from `state`; None if no program would."""
        if self.life is not None and _is_of_another_version(state):
            return f"what was trained before the restart was {_OTHER_VERSION}"
        if not _is_place_state(state) or not _is_earlier(state["life"], self.life):
            return None
        different = self.work.differences(state["work"])
        return (
            f"what was trained before the restart is different work: {', '.join(different)}"
            if different
            else None
        )

    def _finished_by(self, state: dict[str, Any]) -> Place:
        made = [*state.get("names", ()), *[None] * len(state["earlier"])][self.compile]
        return replace(self, superseded=True, made=made)

    def _had_finished(self, state: dict[str, Any]) -> bool:
        return self.work.digest in state["earlier"][self.compile : self.compile + 1]

    def _at(self, state: dict[str, Any], metrics: Metrics) -> Place:
        # A restored checkpoint has no trained tokens: it was trained before.
        trained = state["trained"] or metrics.get("trained_tokens") != 0
        at = replace(self, id=state["id"], step=state["step"], trained=trained, restored=state["restored"])
        outstanding = cursor_of(state["pool"], state["step"]) if "pool" in state else None
        at = replace(at, settings=state.get("settings", {}), outstanding=outstanding, validating=None)
        if state["held_out"] != self.held_out:  # other examples: nothing of theirs compares with these
            return replace(at, scores=[], best=None, best_scores=None)
        if "validating" in state:
            at = replace(at, validating=PendingValidation(**state["validating"]))
        unknown = [None] * (state["best_examples"] - len(state["best_scores"]))
        return replace(
            at,
            scores=[Validated(**it) for it in state["scores"]],
            best=Validated(**state["best"]) if state["best"] else None,
            best_scores=[*state["best_scores"], *unknown] if state["best"] else None,
        )


def digest_of(examples: Sequence[dict[str, Any]]) -> str:
    """A short name of a validation set: the same in every process, with any values in its fields."""
    text = "\n".join(json.dumps(_stable_json(it)) for it in examples)
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:16]


def _stable_json(value: Any) -> Any:
    """A value in JSON's types. An object's own text may have its address in it, so its type replaces it."""
    if isinstance(value, dict):
        return [[_stable_json(key), _stable_json(its)] for key, its in value.items()]
    if isinstance(value, (list, tuple)):
        return [_stable_json(it) for it in value]
    return value if value is None or isinstance(value, (str, int, float)) else type(value).__name__


def _is_place_state(state: dict[str, Any] | None) -> TypeGuard[dict[str, Any]]:
    return state is not None and state.get("by") == _BY and state.get("schema") == _SCHEMA


def _is_of_another_version(state: dict[str, Any] | None) -> bool:
    return state is not None and state.get("by") == _BY and state.get("schema") != _SCHEMA


def _is_earlier(theirs: str | None, mine: str | None) -> bool:
    """Whether `theirs` is another life of the program that `mine` is one of."""
    if theirs is None or mine is None or theirs == mine:
        return False
    return theirs.rpartition("@")[0] == mine.rpartition("@")[0]
