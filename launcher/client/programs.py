"""What of a DSPy program is trained, and the adapter it is trained with.

Neighbours: `grpo.py` and `validation.py` prepare a program here; `lm.py` is the LM a trained predictor holds.
Knows nothing of rollouts, rewards or steps.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from urllib.parse import urlsplit

import dspy

from launcher.client.lm import PolicyLM
from launcher.client.session import Session
from launcher.client.tagging import header_safe


@dataclass(frozen=True)
class Trained:
    """The predictors that ask the policy, and what was decided about the others, in words."""

    names: tuple[str, ...]
    policies: tuple[PolicyLM, ...]
    notes: tuple[str, ...]


def attach(program: dspy.Module, session: Session) -> Trained:
    """Give the policy to each predictor that should have it, in place.

    A predictor asks the policy when its LM (or the configured one) is a PolicyLM, is a plain LM that points
    at this run, or is missing altogether. Others keep their LM and are not trained. Raises ValueError when
    nothing of the program would be trained.
    """
    named = list(program.named_predictors())
    if not named:
        raise ValueError("the program has no predictor, so there is nothing to train")
    configured = dspy.settings.lm
    default = PolicyLM(session) if configured is None else None
    names, policies, notes = [], [], []
    for name, predictor in named:
        lm = predictor.lm or configured or default
        if isinstance(lm, dspy.LM) and not isinstance(lm, PolicyLM) and _points_at(lm, session):
            notes.append(f"predictor {name!r}: its LM points at this run, so it is trained")
            lm = PolicyLM.like(lm, session)
        if isinstance(lm, PolicyLM):
            predictor.lm = lm
            names.append(header_safe(name))
            policies.append(lm)
        else:
            notes.append(f"predictor {name!r} asks {getattr(lm, 'model', lm)!r}: it is not trained")
    if not names:
        raise ValueError(
            "no predictor of the program asks this run's policy, so nothing would be trained; "
            "call program.set_lm(PolicyLM()) or dspy.configure(lm=PolicyLM())"
        )
    return Trained(tuple(names), tuple(dict.fromkeys(policies)), tuple(notes))


def _points_at(lm: dspy.LM, session: Session) -> bool:
    """Whether a plain LM was given the address of this run."""
    base = lm.kwargs.get("api_base") or lm.kwargs.get("base_url")
    if not base:
        return False
    here, there = urlsplit(session.base_url), urlsplit(str(base))
    return (here.hostname, here.port) == (there.hostname, there.port)


def strict_adapter(adapter: dspy.Adapter | None = None) -> dspy.Adapter:
    """The adapter in force, without its second try as JSON.

    That second try doubles the calls and hides the text that failed, so the failure is never penalised.
    """
    adapter = adapter or dspy.settings.adapter or dspy.ChatAdapter()
    strict = copy.copy(adapter)
    if getattr(strict, "use_json_adapter_fallback", False):
        strict.use_json_adapter_fallback = False  # type: ignore[attr-defined]
    return strict
