"""The settings of `GRPO`, checked: every one of dspy.GRPO and ArborGRPO is taken or refused by name.

Neighbours: `grpo.py` and `arbor/config.py` have the parameters, the loop and its parts take the config.
Raises ValueError and TypeError before any request to the run. Knows nothing of programs, examples or HTTP.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import dspy

from launcher.client.alarms import Thresholds
from launcher.client.dspy.grouping import Grouping, RewardRules
from launcher.client.dspy.lm import PolicyLM
from launcher.client.dspy.programs import NEUTRAL_VALUES, is_neutral, is_policy_lm
from launcher.client.dspy.rollouts import RolloutLimits
from launcher.client.scheduler import max_extra_rollouts
from launcher.client.session import Session

DEFAULT_ROLLOUTS = 8

CheckpointMode = Literal["single-best", "improvements", "none"]
OnAlarm = Literal["note", "stop"]

_COUNTS = {
    "num_train_steps": 1,
    "num_dspy_examples_per_grpo_step": 1,
    "num_rollouts_per_grpo_step": 2,
    "num_steps_for_val": 1,
    "staleness": 0,
    "rollout_calls": 1,
}
_NUMBERS = ("failure_score", "format_failure_score", "rollout_seconds")
_BOOLEANS = ("exclude_demos", "multitask", "use_train_as_val", "report_train_scores")
_CHOICES: dict[str, tuple[Any, ...]] = {
    "checkpoint": get_args(CheckpointMode),
    "on_alarm": get_args(OnAlarm),
    "resume": (None, True, False),
    "variably_invoked_predictor_grouping_mode": get_args(Grouping),
}
_REASONS = {
    "dynamic_sampling": ": one example more is so many rollouts; False is none",
    "num_rollouts_per_grpo_step": ": a rollout is compared with the others of its group",
    "variably_invoked_predictor_grouping_mode": (
        ': "fill" would train copies of one sample as if they were several; "ragged" trains all that was '
        "sampled, each with its own run's reward"
    ),
}


@dataclass(frozen=True, kw_only=True)
class GRPOConfig:
    """The settings of one `compile`, as `GRPO` explains them. Raises ValueError and TypeError for the first
    that cannot be meant."""

    train_kwargs: Mapping[str, Any] | Mapping[dspy.LM, Mapping[str, Any]]
    adapter: dspy.Adapter | Mapping[dspy.LM, dspy.Adapter] | None
    exclude_demos: bool
    multitask: bool
    num_threads: int | None
    num_train_steps: int
    seed: int
    num_dspy_examples_per_grpo_step: int
    num_rollouts_per_grpo_step: int
    use_train_as_val: bool
    num_steps_for_val: int
    report_train_scores: bool
    failure_score: float
    format_failure_score: float
    variably_invoked_predictor_grouping_mode: Grouping
    variably_invoked_predictor_fill_strategy: None
    checkpoint: CheckpointMode
    staleness: int
    dynamic_sampling: bool | int
    rollout_seconds: float
    rollout_calls: int
    alarms: Mapping[str, float] | None
    on_alarm: OnAlarm
    resume: bool | None

    def __post_init__(self) -> None:
        _check_values(self)
        check_train_kwargs(self.train_kwargs)
        Thresholds.of(self.alarms)

    @property
    def thresholds(self) -> Thresholds:
        """The thresholds of its alarms."""
        return Thresholds.of(self.alarms)

    @property
    def rollouts_per_step(self) -> int:
        """A step's own rollouts."""
        return self.num_dspy_examples_per_grpo_step * self.num_rollouts_per_grpo_step

    @property
    def max_extra_rollouts(self) -> int:
        """Rollouts that a step may have besides its own, for examples whose rewards were all equal."""
        return max_extra_rollouts(self.dynamic_sampling, self.rollouts_per_step)

    @property
    def reward_rules(self) -> RewardRules:
        """The rewards of failed runs, and how calls are grouped."""
        return RewardRules(
            self.failure_score, self.format_failure_score, self.variably_invoked_predictor_grouping_mode
        )

    def limits(self, places: int | None) -> RolloutLimits:
        """The limits of runs; `places`: of the run's engines."""
        return RolloutLimits(self.num_threads, self.rollout_seconds, self.rollout_calls, places)


def _check_values(config: GRPOConfig) -> None:
    for name, least in _COUNTS.items():
        _check_count(name, getattr(config, name), least)
    if config.num_threads is not None:
        _check_count("num_threads", config.num_threads, 1)
    for name in _NUMBERS:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f"{name} must be a number, not {value!r}")
    for name in _BOOLEANS:
        if not isinstance(getattr(config, name), bool):
            raise ValueError(f"{name} must be True or False, not {getattr(config, name)!r}")
    for name, choices in _CHOICES.items():
        if getattr(config, name) not in choices:
            listed = " or ".join(repr(it) for it in choices)
            raise ValueError(
                f"{name} must be {listed}, not {getattr(config, name)!r}{_REASONS.get(name, '')}"
            )
    if isinstance(config.seed, bool) or not isinstance(config.seed, int):
        raise ValueError(f"seed must be a whole number, not {config.seed!r}")
    if config.rollout_seconds <= 0:
        raise ValueError("rollout_seconds must be above 0")
    if config.format_failure_score >= config.failure_score:
        raise ValueError("format_failure_score must be below failure_score")
    if not isinstance(config.dynamic_sampling, bool):
        _check_count("dynamic_sampling", config.dynamic_sampling, config.num_rollouts_per_grpo_step)
    _check_unsupported(config)


def _check_count(name: str, value: Any, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be a whole number, not {value!r}")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}{_REASONS.get(name, '')}")


def _check_unsupported(config: GRPOConfig) -> None:
    """Parameters of dspy.GRPO and ArborGRPO that mean something else here, or nothing."""
    if not config.multitask:
        raise ValueError(
            "multitask=False is not supported: one policy is trained for all predictors, jointly"
        )
    if config.variably_invoked_predictor_fill_strategy is not None:
        raise ValueError(
            "variably_invoked_predictor_fill_strategy belongs to the grouping mode 'fill', which is refused"
            + _REASONS["variably_invoked_predictor_grouping_mode"]
        )
    _check_adapter(config.adapter)


def _check_adapter(adapter: Any) -> None:
    for it in adapter.values() if is_by_lm(adapter) else [adapter]:
        if it is not None and not isinstance(it, dspy.Adapter):
            raise TypeError(
                f"adapter must be a dspy.Adapter, not a {type(it).__name__}: there is one policy, and "
                "the adapter that samples is the one that is trained"
            )


def check_train_kwargs(train_kwargs: Any) -> None:
    """Check that they are keywords, and check those of sampling: a narrowed distribution would be trained
    wrongly (C9).

    The run checks the others.
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
    elif name in NEUTRAL_VALUES and not is_neutral(name, value):
        raise ValueError(
            f"train_kwargs: {name}={value!r} samples from a different distribution than the policy's"
        )


def is_by_lm(given: Any) -> bool:
    """Whether it is DSPy's form, with a value for each LM."""
    return isinstance(given, Mapping) and bool(given) and all(isinstance(it, dspy.BaseLM) for it in given)


def value_for_policy(name: str, given: Any, session: Session) -> Any:
    """The value given; of values given by LM, the common one: all these LMs are one policy.

    Raises ValueError if one of them is another model, or the values differ.
    """
    if not is_by_lm(given):
        return given
    for lm in given:
        if not is_policy_lm(lm, session):
            raise ValueError(
                f"{name} is given for {lm.model!r}, which is not this run's policy: nothing trains it"
            )
    first, *others = given.values()
    if any(it != first for it in others):
        raise ValueError(f"{name} differs by LM, but they are one policy: give the same for all")
    return first


def resolve_num_rollouts(rollouts: int, samples: int | None) -> int:
    """`num_samples_per_input` is an older name of `num_rollouts_per_grpo_step`; the default is 8."""
    if samples is None or samples == rollouts:
        return rollouts
    if rollouts != DEFAULT_ROLLOUTS:
        raise ValueError(
            f"num_samples_per_input={samples} and num_rollouts_per_grpo_step={rollouts} are two names of one "
            "thing: give one"
        )
    return samples


def deprecated_name_warnings(samples: int | None) -> list[str]:
    """The warning for an older name of a parameter."""
    if samples is None:
        return []
    return [f"num_samples_per_input={samples} is an older name: say num_rollouts_per_grpo_step={samples}"]


def check_sampling(train_kwargs: Mapping[str, Any], policies: Sequence[PolicyLM]) -> None:
    """A setting given both here and on the LM must have the same value, because neither takes precedence."""
    for name, value in train_kwargs.items():
        for policy in policies if name == "temperature" or name in NEUTRAL_VALUES else ():
            other = policy.kwargs.get(name, policy.policy.extra_body.get(name))
            if (
                value is None
                or other is None
                or other == value
                or (name in NEUTRAL_VALUES and is_neutral(name, other))
            ):
                continue
            raise ValueError(f"train_kwargs: {name}={value!r}, but the program's LM has {name}={other!r}")
