"""Arbor's arguments that GRPO spells differently: each is translated, and one plain line reports it once.

Neighbours: `optimizer.py` has the parameters, `client/dspy/grpo_config.py` checks the results. Raises
ValueError and TypeError for invalid values. Knows nothing of runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

import dspy

from launcher.client.arbor.stderr_log import log_once
from launcher.client.dspy.grouping import Grouping
from launcher.client.dspy.grpo_config import CheckpointMode

T = TypeVar("T")
ByLM = Mapping[dspy.LM, Mapping[str, Any]]

_DEFAULT_ROLLOUTS = 4
_FILL_STRATEGIES = (None, "randint", "max")


def check_arbor_arguments(
    metric: Any, exclude_demos: bool, use_train_as_val: bool, report_train_scores: bool
) -> None:
    """Refuse the arguments that ArborGRPO refuses, with a hint."""
    if metric is None:
        raise ValueError("ArborGRPO needs a metric: ArborGRPO(metric=…)")
    if exclude_demos is False:
        raise ValueError(
            "ArborGRPO needs exclude_demos=True, as in Arbor; launcher.client.GRPO trains programs with demos"
        )
    if use_train_as_val and not report_train_scores:
        raise ValueError("use_train_as_val=True needs report_train_scores=True, as in Arbor")


def resolve_num_rollouts(rollouts: int | None, samples_per_input: int | None) -> int:
    """`num_samples_per_input` is PAPILLON's name of `num_rollouts_per_grpo_step`."""
    if samples_per_input is None:
        return _DEFAULT_ROLLOUTS if rollouts is None else rollouts
    if rollouts not in (None, samples_per_input):
        raise ValueError(
            f"num_samples_per_input={samples_per_input} and num_rollouts_per_grpo_step={rollouts} are two "
            "names of one thing: give one"
        )
    log_once(f"num_samples_per_input={samples_per_input} is num_rollouts_per_grpo_step={samples_per_input}")
    return samples_per_input


def resolve_multitask(multitask: bool | None) -> bool:
    """True is always the case; False is refused with the checks of the other values."""
    if multitask is True:
        log_once("multitask=True needs no saying: all predictors are always trained together")
    return True if multitask is None else multitask


def resolve_grouping(mode: str, strategy: str | None) -> Grouping:
    """`fill` would train copies of one sample as if they were several: it is taken as `ragged`."""
    if strategy not in _FILL_STRATEGIES:
        raise ValueError(
            f"variably_invoked_predictor_fill_strategy must be 'randint', 'max' or None, not {strategy!r}"
        )
    if mode != "fill":
        if strategy is not None:
            log_once(f"variably_invoked_predictor_fill_strategy={strategy!r} has no effect without 'fill'")
        return cast("Grouping", mode)  # any other is refused where the values are checked
    log_once(
        "variably_invoked_predictor_grouping_mode='fill' is taken as 'ragged': every call is trained once, "
        "with its own run's reward, and none is copied to fill a group"
    )
    return "ragged"


def resolve_checkpoint(checkpoint: Any) -> tuple[CheckpointMode, Path | None]:
    """Which checkpoints are kept; and for a path, the folder that gets the best adapter."""
    if checkpoint in get_args(CheckpointMode):
        return checkpoint, None
    if not isinstance(checkpoint, (str, Path)) or not str(checkpoint).strip():
        raise ValueError(
            f"checkpoint must be 'single-best', 'improvements', 'none' or a folder's name, not {checkpoint!r}"
        )
    folder = Path(checkpoint).expanduser().absolute()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"checkpoint={str(checkpoint)!r} is a file, and no folder for an adapter")
    log_once(f"checkpoint={str(checkpoint)!r} is 'single-best', and the best adapter is copied to {folder}")
    return "single-best", folder


def value_for_program(given: Any, lms: Sequence[Any] | None) -> Any:
    """The value given; of values given by LM, the one for the program's LMs; without a program, None.

    One policy is trained, so all its LMs must have the same.
    """
    if not _is_by_lm(given):
        return given
    if lms is None:
        return None
    found = [its for lm, its in given.items() if any(lm is it for it in lms)]
    if not found:
        raise ValueError("train_kwargs or adapter is given by LM, but none of these LMs is the program's")
    if any(it != found[0] for it in found):
        raise ValueError("train_kwargs or adapter differ by LM, but one policy is trained: give one for all")
    log_once("of the values given by LM, the one of the program's own LM is used: one policy is trained")
    return found[0]


def _is_by_lm(given: Any) -> bool:
    return isinstance(given, Mapping) and bool(given) and all(isinstance(it, dspy.BaseLM) for it in given)
