"""The trained predictors of a DSPy program, and the adapter they are trained with.

Neighbours: `grpo.py` and `validation.py` prepare a program here; `lm.py` is the LM a trained predictor holds.
Knows nothing of rollouts, rewards or steps.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import dspy

from launcher.client.dspy.default_lm_fallback import is_fallback_lm
from launcher.client.dspy.engine import BASE_MODEL, is_base_name
from launcher.client.dspy.lm import PolicyLM
from launcher.client.dspy.lm_endpoint import SET_API_BASE_HINT, targets_run, targets_run_by_environment
from launcher.client.dspy.predictors import frozen_predictors, header_safe
from launcher.client.session import Session


@dataclass(frozen=True)
class TrainedPredictors:
    """The predictors that use the policy, and notes on the others, in words.

    `lm` is in force while the program runs, for predictors without an LM of their own; None: the present one
    stays. `uses_base`: the model before training replaces the policy.
    """

    names: tuple[str, ...]
    policies: tuple[PolicyLM, ...]
    notes: tuple[str, ...]
    lm: PolicyLM | None = None
    uses_base: bool = False


_USES_BASE = f" uses {BASE_MODEL!r}, the model before training: it is not trained"


def policy_lm_text(model: str | None = None) -> str:
    """How a program writes an LM of the run: the policy, or this model."""
    return f"PolicyLM(model={model!r})" if model else "PolicyLM()"


def attach_policy(
    program: dspy.Module,
    session: Session,
    may_be_base: bool = False,
    lm_text: Callable[[], str] = policy_lm_text,
) -> TrainedPredictors:
    """Give the policy to each predictor that should have it, in place.

    A predictor uses the policy when its LM (or the configured one) is a PolicyLM, is a plain LM that points
    at this run, or is missing altogether (then a note tells the source of its settings). Others keep their LM
    and are not trained, nor are those of a part that is compiled already. Raises TypeError for an object that
    is no program, ValueError when nothing of it would be trained or when it uses another run. `may_be_base`:
    a program that only uses the model before training raises no error, because it is only evaluated.
    `lm_text` names the policy's LM in an error.
    """
    if not isinstance(program, dspy.Module):
        raise TypeError(f"the program must be a dspy.Module, not {type(program).__name__}")
    named = list(program.named_predictors())
    if not named:
        raise ValueError("the program has no predictor, so there is nothing to train")
    configured = dspy.settings.lm
    default, whose = _default_lm(configured, session)
    names, policies, notes = [], [], []
    if whose and (without := [name for name, predictor in named if predictor.lm is None]):
        notes.append(f"{', '.join(without)}: no LM of its own, so it uses the policy {whose}")
    for name, predictor in named:
        lm, note = _policy_for(predictor.lm or default or configured, session)
        if note:
            notes.append(f"predictor {name!r}{note}")
        if lm is not None:
            predictor.lm = lm
            names.append(header_safe(name))
            policies.append(lm)
    of_base = may_be_base and not names and any(_is_base(it.lm or configured) for _, it in named)
    if not names and not of_base:
        raise ValueError(
            "no predictor of the program uses this run's policy, so nothing would be trained; "
            f"call program.set_lm(lm) or dspy.configure(lm=lm) with lm = {lm_text()}"
        )
    notes += _environment_warnings(program, session)
    frozen = list(frozen_predictors(program))
    if frozen:
        notes.append(
            f"{', '.join(frozen)}: inside an already compiled part, which DSPy does not change: not "
            "trained (set its _compiled to False to train it)"
        )
    return TrainedPredictors(tuple(names), tuple(dict.fromkeys(policies)), tuple(notes), default, of_base)


def _environment_warnings(program: dspy.Module, session: Session) -> list[str]:
    """A line for each model that its program means to ask elsewhere, and that would be asked here."""
    parts = [part for _, part in program.named_sub_modules()]
    lms = [dspy.settings.lm, *(value for part in parts for value in vars(part).values())]
    run = session.connection
    strays = {
        lm.model for lm in lms if targets_run_by_environment(lm, run.base_url) and not targets_run(lm, run)
    }
    return [f"{model!r} is not trained, and would fail: {SET_API_BASE_HINT}" for model in sorted(strays)]


def with_own_lms(program: dspy.Module, trained: TrainedPredictors, model: str) -> TrainedPredictors:
    """Give each trained predictor an LM that names `model`, and will later name the trained version.

    An LM that an earlier compile has named stays with the program of that compile, and the configured LM
    stays with all its users: then a copy is named here.
    """
    own = {id(policy): _own_lm(policy, trained) for policy in trained.policies}
    for policy in own.values():
        policy.model = model
    for _, predictor in program.named_predictors():
        predictor.lm = own.get(id(predictor.lm), predictor.lm)
    return replace(trained, policies=tuple(own.values()))


def _own_lm(policy: PolicyLM, trained: TrainedPredictors) -> PolicyLM:
    is_shared = policy.compiled or policy is trained.lm or policy is dspy.settings.lm
    return policy.unpinned_copy() if is_shared else policy


def sampling_warnings(policies: Sequence[PolicyLM], temperature: float) -> list[str]:
    """Warnings for an LM's settings that rollouts do not apply: they sample from the policy as it is (C9)."""
    notes = []
    for policy in policies:
        lm_settings = {name: value for name, value in policy.kwargs.items() if value is not None}
        lm_settings |= policy.policy.extra_body
        if lm_settings.get("temperature") not in (None, temperature):
            notes.append(
                f"rollouts sample at temperature {temperature:g}, not the LM's {lm_settings['temperature']}"
            )
        narrowing = [
            f"{name}={lm_settings[name]}"
            for name in NEUTRAL_VALUES
            if not is_neutral(name, lm_settings.get(name))
        ]
        if narrowing:
            notes.append(f"rollouts sample without {', '.join(narrowing)}: these change the distribution")
    return list(dict.fromkeys(notes))


# Values that keep the policy's own distribution: accepted, because programs for other optimizers set them.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "top_p": (1, None),
    "top_k": (-1, 0, None),
    "min_p": (0, None),
    "repetition_penalty": (1, None),
    "presence_penalty": (0, None),
    "frequency_penalty": (0, None),
}


def is_neutral(name: str, value: Any) -> bool:
    """Whether a setting keeps the distribution unchanged."""
    return value in NEUTRAL_VALUES[name]


def _default_lm(configured: Any, session: Session) -> tuple[PolicyLM | None, str | None]:
    """The default LM for predictors without one, and a note on the source of its settings if the user did not
    configure it.

    DSPy's prompt optimizers return programs without the LM they were given: its settings are kept.
    """
    if is_fallback_lm(configured) and configured.session.endpoint.root == session.endpoint.root:
        return (
            configured,
            f"as the first LM of the policy in this program does ({_settings_text(configured)})",
        )
    if configured is None or is_fallback_lm(configured):
        return PolicyLM(session), "with default settings (an LM of its own, by program.set_lm, has others)"
    if _is_plain(configured) and targets_run(configured, session.connection):
        return PolicyLM.from_lm(configured, session), None
    return None, None


def _settings_text(lm: PolicyLM) -> str:
    lm_settings = {name: value for name, value in lm.kwargs.items() if value is not None}
    lm_settings |= lm.policy.extra_body
    return ", ".join(f"{name}={value}" for name, value in lm_settings.items()) or "default settings"


def _policy_for(lm: Any, session: Session) -> tuple[PolicyLM | None, str | None]:
    """The policy that replaces this LM, or None when it is another model; and a note on it."""
    if _is_plain(lm) and targets_run(lm, session.connection):
        if is_base_name(lm.model):
            return None, _USES_BASE
        return PolicyLM.from_lm(lm, session), ": its LM points at this run, so it is trained"
    if not isinstance(lm, PolicyLM):
        return None, f" uses {getattr(lm, 'model', lm)!r}: it is not trained"
    if lm.session.endpoint.root != session.endpoint.root:
        raise ValueError(
            f"the program uses the run at {lm.session.endpoint.root}, but the optimizer trains the run at "
            f"{session.endpoint.root}"
        )
    if _is_base(lm):
        return None, _USES_BASE
    return lm, None


def is_policy_lm(lm: Any, session: Session) -> bool:
    """Whether the LM is this run's policy, or a plain one that uses it."""
    if isinstance(lm, PolicyLM):
        return lm.session.endpoint.root == session.endpoint.root and not _is_base(lm)
    return _is_plain(lm) and targets_run(lm, session.connection)


def _is_base(lm: Any) -> bool:
    return isinstance(lm, PolicyLM) and lm.model == BASE_MODEL


def _is_plain(lm: Any) -> bool:
    return isinstance(lm, dspy.LM) and not isinstance(lm, PolicyLM)


def strict_adapter(adapter: dspy.Adapter | None = None) -> dspy.Adapter:
    """The adapter in force, without its second try as JSON.

    That second try doubles the calls and hides the text that failed, so the failure is never penalised.
    """
    adapter = adapter or dspy.settings.adapter or dspy.ChatAdapter()
    strict = copy.copy(adapter)
    if getattr(strict, "use_json_adapter_fallback", False):
        strict.use_json_adapter_fallback = False  # type: ignore[attr-defined]
    return strict
