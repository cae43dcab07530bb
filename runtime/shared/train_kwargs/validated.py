"""Keywords about facts of the run, fixed when it started: they are compared with it.

If they differ, the answer has the options of `launch` with which a run would fit. Neighbours: `table.py`
lists them; `lora_config.py` compares LoRA. A difference that does not change the learning is noted.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

from runtime.shared.model_names import ModelNames
from runtime.shared.runtime_config import RuntimeConfig
from runtime.shared.train_kwargs import lora_config
from runtime.shared.train_kwargs.translation import (
    Handler,
    Translation,
    UnsupportedValueError,
    boolean,
    integer,
    launch_option,
    number,
)

# That `launch` takes.
_MAX_GPUS = 1024


def _model(reading: Translation, name: str, value: Any) -> None:
    if not isinstance(value, str) or not value.strip() or value.startswith("-"):
        raise UnsupportedValueError("expected a model's name")
    names = ModelNames.of(reading.run.config)
    if not names.has(value.removeprefix("openai/").removeprefix("arbor:")):
        raise UnsupportedValueError(
            f"{value!r} was requested, this run has {names.own}", f"--model {shlex.quote(value)}"
        )


def _gpus(own: Callable[[RuntimeConfig], int], what: str, option: str) -> Handler:
    def act(reading: Translation, name: str, value: Any) -> None:
        requested, config = integer(value, 1), reading.run.config
        if config.device == "cpu":
            reading.note(name, f"this run is on a CPU; on GPUs `{option} {requested}` says it")
        elif requested != own(config):
            launch = f"{option} {requested}" if requested <= _MAX_GPUS else ""
            raise UnsupportedValueError(f"{requested} are asked for, this run {what} {own(config)}", launch)

    return act


def _bf16(reading: Translation, name: str, value: Any) -> None:
    config = reading.run.config
    if boolean(value) == (config.dtype == "bfloat16"):
        return
    if value and config.device == "cuda":
        raise UnsupportedValueError(
            f"this run computes in {config.dtype}", launch_option(config, "dtype", "bfloat16")
        )
    reading.note(name, f"this run computes in {config.dtype}")


def _fp16(reading: Translation, name: str, value: Any) -> None:
    if boolean(value):
        reading.note(name, f"this run computes in {reading.run.config.dtype} (Arbor itself never sends fp16)")


def _length(what: str) -> Handler:
    """`what` is at most so many tokens: nothing is cut here, so only a larger number is a difference."""

    def act(reading: Translation, name: str, value: Any) -> None:
        requested, own = integer(value, 1), reading.run.config.engine.max_model_len
        limit = reading.run.context_tokens or own
        if limit is None:
            reading.note(name, "not compared: what the engines take is not known yet")
        elif requested <= limit:
            reading.note(name, f"{what}; prompt and answer together may have {limit} tokens")
        elif own is not None and own <= limit and reading.strict:
            why = f"prompt and answer together have at most {limit} tokens in this run"
            raise UnsupportedValueError(
                why, launch_option(reading.run.config, "engine.max_model_len", requested)
            )
        else:
            reading.note(name, f"prompt and answer together have at most {limit} tokens in this run")

    return act


def _checkpointing(reading: Translation, name: str, value: Any) -> None:
    """The update is the same with and without."""
    own = reading.run.config.train.activation_checkpointing
    if boolean(value) == own:
        return
    if own is None:
        reading.note(
            name, "layers compute their insides again where memory asks for it, which changes no update"
        )
    else:
        requested = str(value).lower()
        reading.note(
            name,
            f"train.activation_checkpointing={str(own).lower()} in this run, which changes no update "
            f"(--set train.activation_checkpointing={requested})",
        )


def _async_prefetch(reading: Translation, name: str, value: Any) -> None:
    requested, own = integer(value), reading.run.config.max_staleness
    if requested > own:
        why = f"a sample older than {own} steps is not trained in this run"
        raise UnsupportedValueError(why, launch_option(reading.run.config, "max_staleness", requested))
    reading.note(name, "GRPO(staleness=N) rolls out up to N steps ahead of the one that trains, and 0 waits")


def must_equal(
    own: Callable[[RuntimeConfig], float | None], option: str, read: Callable[[Any], float] = number
) -> Handler:
    """The same as the run has, by this option."""

    def act(reading: Translation, name: str, value: Any) -> None:
        requested, has = read(value), own(reading.run.config)
        if requested != has:
            own_text = "its own choice" if has is None else f"{has:g}"
            raise UnsupportedValueError(
                f"{requested:g} was requested, this run has {own_text}",
                launch_option(reading.run.config, option, requested),
            )

    return act


VALIDATED: dict[str, Handler] = {
    "lora_config": lora_config.check,
    "peft_config": lora_config.check,
    "model": _model,
    "model_name_or_path": _model,
    "num_training_gpus": _gpus(lambda it: it.train_processes, "trains on", "--train-gpus"),
    "num_inference_gpus": _gpus(lambda it: it.engines, "samples on", "--infer-gpus"),
    "bf16": _bf16,
    "fp16": _fp16,
    "max_seq_len": _length("nothing is cut to it"),
    "max_seq_length": _length("nothing is cut to it"),
    "max_length": _length("nothing is cut to it"),
    "max_context_length": _length("nothing is cut to it"),
    "max_prompt_length": _length("prompts are not cut to it"),
    "max_completion_length": _length("an answer's limit is max_tokens of the LM that asks"),
    "max_tokens": _length("an answer's limit is max_tokens of the LM that asks"),
    "gradient_checkpointing": _checkpointing,
    "seed": must_equal(lambda it: it.train.seed, "train.seed", integer),
    "num_batches_ahead": _async_prefetch,
    "delta": must_equal(lambda it: it.train.dual_clip, "train.dual_clip"),
    "vllm_importance_sampling_cap": must_equal(lambda it: it.train.mismatch_cap, "train.mismatch_cap"),
}
