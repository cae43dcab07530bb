"""The predictors of a DSPy program by name, found by identity; and the one that is calling.

Neighbours: `program_rollout.py` counts by these names, `programs.py` decides which are trained. Knows nothing
of rollouts.
"""

from __future__ import annotations

from collections import Counter

import dspy

UNNAMED_PREDICTOR = "(other)"
"""The predictor of a call that none of the program's own predictors made: one built inside `forward`."""


class Predictors:
    """The names of a program's predictors, found by identity, so that two may share a Signature.

    `frozen`: those inside a part that another optimizer compiled. DSPy leaves such a part as it is, so they
    are told apart but not trained.
    """

    def __init__(self, program: dspy.Module | None = None) -> None:
        named = [(header_safe(name), it) for name, it in _predictors(program)]
        self._program = program  # keeps the ids below from being given to other objects
        self._by_id = {id(predictor): name for name, predictor in named}
        self.names = frozenset(name for name, _ in named)
        self.frozen = frozenset(header_safe(name) for name in frozen_predictors(program))
        # Whose answers are trained: requests of a frozen part or of another model are not.
        self.trained = self.names - self.frozen
        stages = Counter(predictor.stage for _, predictor in named)
        # BestOfN, Refine and others run a deep copy: other objects with the stage of the original.
        self._by_stage = {it.stage: name for name, it in named if stages[it.stage] == 1}

    def current_name(self) -> str:
        """The name of the innermost predictor on DSPy's stack, or OTHER."""
        for module in reversed(dspy.settings.caller_modules or []):
            name = self._by_id.get(id(module)) or self._by_stage.get(getattr(module, "stage", ""))
            if name is not None:
                return name
        return UNNAMED_PREDICTOR


def frozen_predictors(program: dspy.Module | None) -> dict[str, dspy.Predict]:
    """Predictors of parts of the program that are compiled already: DSPy does not list these."""
    if program is None:
        return {}
    listed = {id(it) for _, it in program.named_predictors()}
    parts = [it for _, it in program.named_sub_modules(dspy.Module) if it is not program]
    inside = {
        id(it)
        for part in parts
        if getattr(part, "_compiled", False)
        for _, it in part.named_sub_modules(dspy.Predict)
    }
    return {name: it for name, it in _predictors(program) if id(it) in inside - listed}


def _predictors(program: dspy.Module | None) -> list[tuple[str, dspy.Predict]]:
    """Every predictor by name: those DSPy lists, and those in frozen parts or nested containers."""
    if program is None:
        return []
    found: list[tuple[str, dspy.Predict]] = list(program.named_predictors())
    known = {id(it) for _, it in found}
    for name, it in program.named_sub_modules(dspy.Predict):
        if isinstance(it, dspy.Predict) and id(it) not in known:
            found.append((name.removeprefix("self."), it))
    return found


def header_safe(name: str) -> str:
    """A predictor's name as it travels in a header and in a group."""
    return name.encode("ascii", "backslashreplace").decode()
