"""Keywords that become settings of every step: rate and schedule, clips, loss, rewards, answers cut off.

Neighbours: `table.py` lists them and calls `resolve_combinations` after all of them; the settings are those
of `runtime/shared/schema.py`. Each keyword's meaning in TRL and Arbor is documented here beside its setting.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, get_args

from pydantic import ValidationError

from runtime.shared.schema import StepSettings
from runtime.shared.train_config import per_step_settings
from runtime.shared.train_kwargs.translation import (
    Handler,
    Translation,
    UnsupportedValueError,
    boolean,
    choice,
    integer,
    number,
)

# Arbor makes an optimizer step of each group; a run here one of all the groups of a step (X12).
_LOW_RATE = 1e-5
# TRL's names, each with our loss and normaliser.
_LOSSES = {
    "grpo": {"loss": "grpo", "normaliser": "sequence"},
    "bnpo": {"loss": "grpo", "normaliser": "token"},
    "dapo": {"loss": "dapo"},
    "dr_grpo": {"loss": "dr_grpo"},
    "cispo": {"loss": "cispo"},
    "gspo": {"loss": "gspo"},
}
_SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
}
# TRL's default `epsilon`, on both sides; its cispo and gspo clip otherwise.
_EPSILON = 0.2
_CLIPPED_LOSSES = ("grpo", "bnpo", "dapo")
_SCALES = {True: True, "group": True, False: False, "none": False}


def _plain(setting: str) -> Handler:
    """A keyword whose value is the setting's own."""
    parse = _parser_of(setting)

    def act(reading: Translation, name: str, value: Any) -> None:
        reading.apply(name, setting, bounded(setting, parse(value)))

    return act


def _parser_of(setting: str) -> Callable[[Any], Any]:
    options = get_args(StepSettings.model_fields[setting].annotation)
    return number if float in options else integer if int in options else lambda value: value


def bounded(setting: str, value: Any) -> Any:
    """The value, if the setting takes it. Raises UnsupportedValueError."""
    try:
        return getattr(StepSettings.model_validate({setting: value}, strict=True), setting)
    except ValidationError as error:
        message = error.errors(include_url=False)[0]["msg"]
        raise UnsupportedValueError(message[0].lower() + message[1:]) from None


def _learning_rate(reading: Translation, name: str, value: Any) -> None:
    rate = bounded("learning_rate", number(value))
    reading.apply(name, "learning_rate", rate)
    if rate < _LOW_RATE:
        reading.note(
            name,
            "used as it is. Arbor makes an update for each group, here one is made of all groups of a step, "
            f"and LoRA usually learns with 1e-5 to 1e-4 (this run's own is "
            f"{reading.run.config.train.learning_rate:g})",
        )


def _max_grad_norm(reading: Translation, name: str, value: Any) -> None:
    if not isinstance(value, bool) and number(value) == 0:
        raise UnsupportedValueError("0 is no limit with TRL; here a high limit is none, such as 1e9")
    reading.apply(name, "max_grad_norm", bounded("max_grad_norm", number(value)))


def _scale_rewards(reading: Translation, name: str, value: Any) -> None:
    if value == "batch":
        raise UnsupportedValueError(
            "'batch' divides by the deviation of a whole batch, and rewards are compared within their group "
            "here: True ('group') or False ('none')"
        )
    if not isinstance(value, (bool, str)) or value not in _SCALES:
        raise UnsupportedValueError(f"expected True, False, 'group' or 'none', not {value!r}")
    reading.apply(name, "scale_rewards", _SCALES[value])


def _loss_type(reading: Translation, name: str, value: Any) -> None:
    """In TRL and Arbor "dapo" chooses how tokens are counted, and nothing of the clip or of the rollouts."""
    for setting, its in _LOSSES[choice(value, tuple(_LOSSES))].items():
        reading.apply(name, setting, its)
    if value == "dapo":
        reading.note(
            name,
            "as with TRL and Arbor, each token of a step counts the same. What else the paper has is asked "
            "for by itself: epsilon_high=0.28, dynamic_sampling=True",
        )


def _importance_sampling_level(reading: Translation, name: str, value: Any) -> None:
    """GSPO is TRL's loss_type "grpo" with ratios of whole answers."""
    if choice(value, ("token", "sequence")) == "token":
        if reading.given.get("loss_type") == "gspo":
            raise UnsupportedValueError("gspo compares whole answers: 'sequence', or another loss_type")
        return
    loss = reading.given.get("loss_type", "grpo")
    if loss not in ("grpo", "gspo"):
        raise UnsupportedValueError(
            f"'sequence' compares whole answers, and loss_type={loss!r} counts otherwise: "
            "loss_type='grpo' with it is gspo"
        )
    # With loss_type alone it would mean another loss.
    reading.settings |= {"loss": "gspo", "normaliser": "sequence"}
    reading.sources |= {"loss": name, "normaliser": name}


def _epsilon(reading: Translation, name: str, value: Any) -> None:
    """Without `epsilon_high` it is both bounds, as in TRL; cispo has no lower one."""
    epsilon = number(value)
    if reading.given.get("loss_type") == "cispo":
        reading.note(name, "cispo has no lower bound: epsilon_high is the one it has")
        return
    reading.apply(name, "clip_low", bounded("clip_low", epsilon))
    if reading.given.get("epsilon_high") is None:
        reading.apply(name, "clip_high", epsilon)


def _epsilon_high(reading: Translation, name: str, value: Any) -> None:
    """How far above 1 a ratio may be; with cispo TRL means the highest ratio itself."""
    above = number(value) - (1 if reading.given.get("loss_type") == "cispo" else 0)
    reading.apply(name, "clip_high", bounded("clip_high", above))


def _scheduler(reading: Translation, name: str, value: Any) -> None:
    reading.apply(name, "schedule", _SCHEDULES[choice(value, tuple(_SCHEDULES))])


def _warmup_steps(reading: Translation, name: str, value: Any) -> None:
    """A number below 1 is a ratio, as transformers has it of late."""
    steps = number(value)
    if 0 < steps < 1:
        _warmup_ratio(reading, name, value)
    else:
        reading.apply(name, "warmup_steps", integer(value))


def _warmup_ratio(reading: Translation, name: str, value: Any) -> None:
    ratio = number(value)
    if not 0 <= ratio < 1:
        raise UnsupportedValueError(f"expected a part of all steps from 0 to below 1, not {value}")
    if name == "warmup_ratio" and number(reading.given.get("warmup_steps", 0)) > 0:
        reading.note(name, "not read, as warmup_steps is given")
    elif ratio:
        reading.apply(name, "warmup_steps", math.ceil(ratio * _schedule_over_all_steps(reading)))


def _mask_truncated(reading: Translation, name: str, value: Any) -> None:
    masks = boolean(value)
    if reading.given.get("soft_completion_penalty_length") is None:
        reading.apply(name, "overlong", "mask" if masks else "keep")
    elif masks:
        reading.note(
            name, "answers that were cut off are trained, with soft_completion_penalty_length's charge"
        )


def _soft_overlong(reading: Translation, name: str, value: Any) -> None:
    """Arbor lessens a reward from this length on, to nothing at max_completion_length."""
    start, end = integer(value, 1), reading.given.get("max_completion_length")
    if end is None:
        raise UnsupportedValueError(
            "answers are charged from this length up to max_completion_length: give it as well"
        )
    end = integer(end, 2)
    if end <= start:
        raise UnsupportedValueError(f"it must be below max_completion_length, which is {end}")
    reading.apply(name, "overlong", "soft")
    reading.apply(name, "overlong_tokens", end)
    reading.apply(name, "overlong_buffer", end - start)
    reading.note(
        name,
        f"an answer is charged up to 1 between {start} and {end} tokens, as in DAPO; Arbor makes rewards "
        "above 0 smaller in the same places",
    )


# ------------------------------------------------------------------ keywords that depend on one another


def _schedule_over_all_steps(reading: Translation) -> int:
    steps = reading.steps or reading.given.get("max_steps")
    if steps is None:
        raise UnsupportedValueError("it needs to know how many steps there are: give max_steps as well")
    return integer(steps, 1)


def resolve_combinations(reading: Translation) -> None:
    """The clip of a loss_type; the schedule's end, and the warm-up that a schedule has or has not."""
    _default_clip_of_trl(reading)
    name, settings = reading.sources.get("schedule", ""), reading.settings
    kind = reading.given.get("lr_scheduler_type")
    if kind == "constant" and settings.get("warmup_steps"):
        reading.note(
            reading.sources["warmup_steps"],
            "there is none with lr_scheduler_type='constant': 'constant_with_warmup' has one",
        )
        settings["warmup_steps"] = 0
    if kind == "constant_with_warmup" and "warmup_steps" not in settings:
        reading.note("lr_scheduler_type", "no warm-up, as warmup_steps is not given (Arbor's own is 10)")
    if settings.get("schedule") in ("linear", "cosine") and "schedule_steps" not in settings:
        try:
            settings["schedule_steps"] = _schedule_over_all_steps(reading)
        except UnsupportedValueError as unfit:
            reading.refuse(name, str(unfit))
            del settings["schedule"]
        else:
            reading.sources["schedule_steps"] = name


def _default_clip_of_trl(reading: Translation) -> None:
    """TRL's clip, if neither the keywords nor the run set one."""
    if reading.given.get("loss_type") not in _CLIPPED_LOSSES or reading.settings.get("loss") == "gspo":
        return
    for setting in ("clip_low", "clip_high"):
        if setting not in reading.settings and getattr(reading.run.config.train, setting) is None:
            reading.settings[setting] = _EPSILON
            reading.sources[setting] = "loss_type"


# By the keyword of TRL, Arbor or transformers. Then, under our own names, all settings that a step may have.
MAPPED: dict[str, Handler] = {
    "learning_rate": _learning_rate,
    "max_grad_norm": _max_grad_norm,
    "beta": _plain("kl_beta"),
    "loss_type": _loss_type,
    "importance_sampling_level": _importance_sampling_level,
    "scale_rewards": _scale_rewards,
    "epsilon": _epsilon,
    "epsilon_high": _epsilon_high,
    "lr_scheduler_type": _scheduler,
    "warmup_steps": _warmup_steps,
    "warmup_ratio": _warmup_ratio,
    "mask_truncated_completions": _mask_truncated,
    "soft_completion_penalty_length": _soft_overlong,
}
MAPPED |= {name: _plain(name) for name in per_step_settings() if name not in MAPPED}
