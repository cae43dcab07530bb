"""Loads a saved program so that it uses this run, or the LM it is given, and never any other.

`program.save("program.json")` writes no address and no key. Loaded by DSPy alone, a program that used the
policy asks a vLLM for it, and one saved with a plain LM would call OpenAI with the user's own key.
Neighbours: `lm.py` has the policy's LM. Knows nothing of training.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import dspy
from dspy.clients.base_lm import BaseLM

from launcher.client.dspy.lm import PolicyLM, is_saved_policy
from launcher.client.session import Session, connect


def load(
    program: dspy.Module,
    path: str | Path,
    lm: BaseLM | None = None,
    *,
    session: Session | None = None,
) -> dspy.Module:
    """Load a file of `program.save(path)` into `program` (in place), with prompts and demos.

    A predictor of the policy uses the newest version on the run this program is in, with the settings it was
    saved with; with `lm` it uses that instead, such as the trained weights served elsewhere. A predictor of
    another model is left without an LM unless `lm` is given, because a saved state has no address: set one
    with `set_lm`. Raises NotConnected outside a run when no `lm` is given, ValueError for another kind of
    file.
    """
    path = Path(path)
    if path.suffix != ".json":
        raise ValueError(f"{path.name}: save the program's state with program.save('program.json')")
    state = json.loads(path.read_text())
    state.pop("metadata", None)
    if isinstance(program, dspy.Predict) and "signature" in state:  # saved by itself it has no name
        settings = {"self": _pop_lm({"self": state}, "self")}
    else:
        settings = {name: _pop_lm(state, name) for name, _ in program.named_parameters()}
    if lm is None and any(saved is not None and is_saved_policy(saved) for saved in settings.values()):
        session = session or connect()
    program.load_state(state)
    for name, predictor in program.named_predictors():
        saved = settings.get(name)
        if lm is not None:
            predictor.lm = lm
        elif saved is not None and is_saved_policy(saved):
            predictor.lm = PolicyLM.from_state(saved, session)
    return program


def _pop_lm(state: dict[str, Any], name: str) -> dict[str, Any] | None:
    """Take a predictor's LM out of the state, so that DSPy makes none of it."""
    if name not in state:
        raise ValueError(f"the file has no predictor {name!r}: it was saved from a different program")
    saved = state[name].get("lm")
    state[name]["lm"] = None
    return saved
