"""`lora_config` against the run's own LoRA: rank, alpha, layers. A run's LoRA is made when it starts.

It is a dict, or a `peft.LoraConfig` as JSON. Neighbours: `validated.py` lists it; `train.lora` of
`train_config.py` is the run's own. Features that C27 refuses in an adapter are refused here by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from runtime.shared.projections import PROJECTIONS
from runtime.shared.train_kwargs.translation import (
    Translation,
    UnsupportedValueError,
    boolean,
    choice,
    integer,
    launch_option,
    number,
)

_KEY = "lora_config"
_NAMES = re.compile(r"\w+(\s*,\s*\w+)*")
# With one of these values peft's key changes nothing of the adapter.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "use_dora": (False,),
    "use_qalora": (False,),
    "lora_bias": (False,),
    "fan_in_fan_out": (False,),
    "modules_to_save": ([],),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "layers_to_transform": ([],),
    "layers_pattern": ([], ""),
    "layer_replication": ([],),
    "exclude_modules": ([], ""),
    "trainable_token_indices": ([], {}),
    "target_parameters": ([],),
    "alora_invocation_tokens": ([],),
    "init_lora_weights": (True,),
    "task_type": ("CAUSAL_LM",),
    "peft_type": ("LORA",),
}
# Of peft's own book-keeping.
_WITHOUT_EFFECT = {
    "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "peft_version", "runtime_config",
    "megatron_config", "megatron_core", "loftq_config", "eva_config", "corda_config", "arrow_config",
    "qalora_group_size", "ensure_weight_tying",
}  # fmt: skip
_COMPARED = ("r", "lora_alpha", "target_modules", "use_rslora", "lora_dropout", "bias")


def check(reading: Translation, name: str, value: Any) -> None:
    """Refuse each key of it that the run's LoRA does not have."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise UnsupportedValueError("expected a dict or a peft.LoraConfig")
    for key, its in value.items():
        if its is None or key in _WITHOUT_EFFECT:
            continue
        try:
            _check(reading, key, its)
        except UnsupportedValueError as unfit:
            reading.refuse(f"{_KEY}.{key}", str(unfit), unfit.launch)


def _check(reading: Translation, key: str, value: Any) -> None:
    match key:
        case "r":
            _same(reading, integer(value, 1), "rank")
        case "lora_alpha":
            _same(reading, number(value), "alpha")
        case "use_rslora":
            _same(reading, boolean(value), "use_rslora")
        case "target_modules":
            _check_targets(reading, value)
        case "lora_dropout":
            if number(value):
                reading.note(
                    _KEY,
                    f"lora_dropout={value}: there is none here: what is sampled must be what is trained",
                )
        case "bias":
            choice(value, ("none",))
        case _ if key in _PLAIN:
            if value not in _PLAIN[key]:
                raise UnsupportedValueError("an adapter here is A and B of each layer and nothing else")
        case _:
            _unknown(reading, key)


def _same(reading: Translation, requested: Any, setting: str) -> None:
    own = getattr(reading.run.config.train.lora, setting)
    if requested != own:
        raise UnsupportedValueError(
            f"{_as_text(requested)} was requested, this run has {_as_text(own)}",
            _set(reading, setting, requested),
        )


def _as_text(value: Any) -> str:
    return str(value) if isinstance(value, bool) else f"{value:g}"


def _set(reading: Translation, setting: str, value: Any) -> str:
    plain = int(value) if isinstance(value, float) and value.is_integer() else value
    return launch_option(reading.run.config, f"train.lora.{setting}", plain)


def _check_targets(reading: Translation, value: Any) -> None:
    requested = _targets(value)
    chosen, layers = reading.run.config.train.lora.target_modules, reading.run.layers
    if requested is None:
        if chosen is not None and set(chosen) != set(layers or ()):
            listed = ",".join(chosen)
            raise UnsupportedValueError(
                f"all-linear was requested, this run has {listed}", _set(reading, "target_modules", None)
            )
        return
    own = chosen or layers or PROJECTIONS
    if set(requested) != set(own):
        wanted = sorted(set(requested))
        raise UnsupportedValueError(
            f"{','.join(wanted)} was requested, this run has {','.join(own)}",
            _set(reading, "target_modules", wanted),
        )


def _targets(value: Any) -> tuple[str, ...] | None:
    """The layers' names; None: all of them."""
    if value == "all-linear":
        return None
    if isinstance(value, str) and _NAMES.fullmatch(value.strip()):
        return tuple(it.strip() for it in value.split(","))
    if isinstance(value, str):
        raise UnsupportedValueError(
            "a pattern is not read here: list the names of the layers, or say 'all-linear'"
        )
    if (
        not isinstance(value, list)
        or not value
        or not all(isinstance(it, str) and _NAMES.fullmatch(it) for it in value)
    ):
        raise UnsupportedValueError("expected the names of layers, such as q_proj, or 'all-linear'")
    return tuple(value)


def _unknown(reading: Translation, key: str) -> None:
    close = get_close_matches(key, [*_COMPARED, *_PLAIN], 1)
    meant = f"; did you mean {close[0]}?" if close else ""
    if reading.strict:
        raise UnsupportedValueError(f"it is unknown{meant}")
    reading.note(_KEY, f"{key} is not known here and has no effect{meant}")
