"""What an optimizer may be asked for: every parameter of dspy.GRPO and ArborGRPO, taken or refused by name.

Neighbours: `grpo.py` has the parameters, `training.py` what they do. Raises ValueError and TypeError before
anything is asked of the run. Knows nothing of programs, examples or HTTP.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, get_args

import dspy

from launcher.client.dspy.grouping import Grouping
from launcher.client.dspy.held_out import Keep
from launcher.client.dspy.lm import PolicyLM
from launcher.client.dspy.programs import NEUTRAL, asks_policy, is_neutral
from launcher.client.dspy.training import OnAlarm
from launcher.client.session import Session

DEFAULT_ROLLOUTS = 8

_COUNTS = {
    "num_train_steps": 1,
    "num_dspy_examples_per_grpo_step": 1,
    "num_rollouts_per_grpo_step": 2,
    "num_steps_for_val": 1,
    "staleness": 0,
    "rollout_calls": 1,
}
_NUMBERS = ("failure_score", "format_failure_score", "rollout_seconds")
_SWITCHES = ("exclude_demos", "multitask", "use_train_as_val", "report_train_scores")
_CHOICES: dict[str, tuple[Any, ...]] = {
    "checkpoint": get_args(Keep),
    "on_alarm": get_args(OnAlarm),
    "resume": (None, True, False),
    "variably_invoked_predictor_grouping_mode": get_args(Grouping),
}
_WHY = {
    "dynamic_sampling": ": one example more is so many rollouts; False is none",
    "num_rollouts_per_grpo_step": ": a rollout is compared with the others of its group",
    "variably_invoked_predictor_grouping_mode": (
        ': "fill" would train copies of one sample as if they were several; "ragged" trains all that was '
        "sampled, each with its own run's reward"
    ),
}


class OptimizerParameters(Protocol):
    """An optimizer, by those of its parameters that are more than one of a kind."""

    adapter: Any
    dynamic_sampling: bool | int
    failure_score: float
    format_failure_score: float
    multitask: bool
    num_rollouts_per_grpo_step: int
    num_threads: int | None
    rollout_seconds: float
    seed: int
    variably_invoked_predictor_fill_strategy: None


def check_values(asked: OptimizerParameters) -> None:
    """Raise ValueError for the first parameter that cannot be meant."""
    for name, least in _COUNTS.items():
        _check_count(name, getattr(asked, name), least)
    if asked.num_threads is not None:
        _check_count("num_threads", asked.num_threads, 1)
    for name in _NUMBERS:
        value = getattr(asked, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f"{name} must be a number, not {value!r}")
    for name in _SWITCHES:
        if not isinstance(getattr(asked, name), bool):
            raise ValueError(f"{name} must be True or False, not {getattr(asked, name)!r}")
    for name, choices in _CHOICES.items():
        if getattr(asked, name) not in choices:
            listed = " or ".join(repr(it) for it in choices)
            raise ValueError(f"{name} must be {listed}, not {getattr(asked, name)!r}{_WHY.get(name, '')}")
    if isinstance(asked.seed, bool) or not isinstance(asked.seed, int):
        raise ValueError(f"seed must be a whole number, not {asked.seed!r}")
    if asked.rollout_seconds <= 0:
        raise ValueError("rollout_seconds must be above 0")
    if asked.format_failure_score >= asked.failure_score:
        raise ValueError("format_failure_score must be below failure_score")
    if not isinstance(asked.dynamic_sampling, bool):
        _check_count("dynamic_sampling", asked.dynamic_sampling, asked.num_rollouts_per_grpo_step)
    _check_foreign(asked)


def _check_count(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be a whole number, not {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}{_WHY.get(name, '')}")


def _check_foreign(asked: OptimizerParameters) -> None:
    """Parameters of dspy.GRPO and ArborGRPO that mean something else here, or nothing."""
    if not asked.multitask:
        raise ValueError(
            "multitask=False is not supported: one policy is trained for all predictors, jointly"
        )
    if asked.variably_invoked_predictor_fill_strategy is not None:
        raise ValueError(
            "variably_invoked_predictor_fill_strategy belongs to the grouping mode 'fill', which is refused"
            + _WHY["variably_invoked_predictor_grouping_mode"]
        )
    _check_adapter(asked.adapter)


def _check_adapter(adapter: Any) -> None:
    for it in adapter.values() if is_by_lm(adapter) else [adapter]:
        if it is not None and not isinstance(it, dspy.Adapter):
            raise TypeError(
                f"adapter must be a dspy.Adapter, not a {type(it).__name__}: there is one policy, and "
                "the adapter that samples is the one that is trained"
            )


def check_train_kwargs(train_kwargs: Any) -> None:
    """That they are keywords, and of those how is sampled: what narrows it would be trained wrongly (C9).

    What the others are, the run says.
    """
    for kwargs in train_kwargs.values() if is_by_lm(train_kwargs) else [train_kwargs]:
        if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
            raise TypeError(
                "train_kwargs must map names to values, or each LM of the policy to such a mapping"
            )
        for name, value in kwargs.items():
            _check_sampling_value(name, value)


def _check_sampling_value(name: str, value: Any) -> None:
    if name == "temperature" and value is not None:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 2:
            raise ValueError("train_kwargs: temperature must be above 0 and at most 2")
    elif name in NEUTRAL and not is_neutral(name, value):
        raise ValueError(
            f"train_kwargs: {name}={value!r} samples from a different distribution than the policy's"
        )


def is_by_lm(given: Any) -> bool:
    """Whether it is DSPy's form, with a value for each LM."""
    return isinstance(given, Mapping) and bool(given) and all(isinstance(it, dspy.BaseLM) for it in given)


def for_policy(name: str, given: Any, session: Session) -> Any:
    """What was given; of what was given by LM, the one value there is: all these LMs are one policy.

    Raises ValueError where one of them is another model, or the values differ.
    """
    if not is_by_lm(given):
        return given
    for lm in given:
        if not asks_policy(lm, session):
            raise ValueError(
                f"{name} is given for {lm.model!r}, which is not this run's policy: nothing trains it"
            )
    first, *others = given.values()
    if any(it != first for it in others):
        raise ValueError(f"{name} differs by LM, but they are one policy: give the same for all")
    return first


def rollouts_by_either_name(rollouts: int, samples: int | None) -> int:
    """`num_samples_per_input` is an older name of `num_rollouts_per_grpo_step`; 8 is what nobody has said."""
    if samples is None or samples == rollouts:
        return rollouts
    if rollouts != DEFAULT_ROLLOUTS:
        raise ValueError(
            f"num_samples_per_input={samples} and num_rollouts_per_grpo_step={rollouts} are two names of one "
            "thing: give one"
        )
    return samples


def older_names(samples: int | None) -> list[str]:
    """What is said of an older name of a parameter."""
    if samples is None:
        return []
    return [f"num_samples_per_input={samples} is an older name: say num_rollouts_per_grpo_step={samples}"]


def check_sampling(train_kwargs: Mapping[str, Any], policies: Sequence[PolicyLM]) -> None:
    """What was said twice, here and on the LM, must be the same: nobody could tell which is meant."""
    for name, value in train_kwargs.items():
        for policy in policies if name == "temperature" or name in NEUTRAL else ():
            other = policy.kwargs.get(name, policy.policy.extra_body.get(name))
            if (
                value is None
                or other is None
                or other == value
                or (name in NEUTRAL and is_neutral(name, other))
            ):
                continue
            raise ValueError(f"train_kwargs: {name}={value!r}, but the program's LM has {name}={other!r}")
