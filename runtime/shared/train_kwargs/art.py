"""ART's keywords: those of `LocalBackend.train` of 0.5, and of its `TrainConfig` and `dev.TrainConfig`.

ART's meaning of each keyword is documented here, beside its effect; if it is TRL's meaning, it is that of
`mapped.py` or `validated.py`. A keyword that is not given has the run's value; ART's own defaults are not
used. Neighbours: `table.py` reads by it. Several keywords change the learning in a way that a run here does
not support. These are refused by name, unless their value turns them off.
"""

from __future__ import annotations

from typing import Any

from runtime.shared.train_kwargs.lora_config import check as check_lora
from runtime.shared.train_kwargs.mapped import bounded
from runtime.shared.train_kwargs.translation import (
    Handler,
    Keyword,
    Translation,
    UnsupportedValueError,
    boolean,
    choice,
    number,
)
from runtime.shared.train_kwargs.validated import VALIDATED, must_equal

# ART makes an update of each packed sequence; a run here one of all the groups of a step.
_LOW_RATE = 1e-5
# As ART computes them: tokens count alike in both.
_LOSSES = {"cispo": {"loss": "cispo"}, "ppo": {"loss": "grpo", "normaliser": "token"}}
_LEVELS = ("token", "sequence", "average", "geometric_average")
_UNSUPPORTED = "this run does not support it"


def _learning_rate(reading: Translation, name: str, value: Any) -> None:
    rate = bounded("learning_rate", number(value))
    reading.apply(name, "learning_rate", rate)
    if rate < _LOW_RATE:
        reading.note(
            name,
            "used as it is. ART makes an update of each packed sequence, here one is made of all groups, and "
            f"LoRA usually learns with 1e-5 to 1e-4 (this run's own is "
            f"{reading.run.config.train.learning_rate:g})",
        )


def _loss(reading: Translation, name: str, loss: str) -> None:
    for setting, its in _LOSSES[loss].items():
        reading.apply(name, setting, its)


def _loss_fn(reading: Translation, name: str, value: Any) -> None:
    _loss(reading, name, choice(value, tuple(_LOSSES)))


def _ppo(reading: Translation, name: str, value: Any) -> None:
    _loss(reading, name, "ppo" if boolean(value) else "cispo")


def _is_cispo(reading: Translation) -> bool:
    loss_fn = reading.given.get("loss_fn")
    return loss_fn == "cispo" or (loss_fn is None and reading.given.get("ppo") is False)


def _level(reading: Translation, name: str, value: Any) -> None:
    """Whole answers compared are gspo; ART's averages of both ratios are nothing that a run here has."""
    level = choice(value, _LEVELS)
    if level == "token":
        return
    if level != "sequence" or _is_cispo(reading):
        raise UnsupportedValueError(
            "ratios are of tokens here, or of whole answers with loss_fn='ppo' (which is gspo)"
        )
    reading.settings |= {"loss": "gspo", "normaliser": "sequence"}
    reading.sources |= {"loss": name, "normaliser": name}
    reading.note(name, "this is gspo here")


def _epsilon(reading: Translation, name: str, value: Any) -> None:
    """Without `epsilon_high` it is both bounds; ART's cispo then has a highest of its own."""
    epsilon = number(value)
    reading.apply(name, "clip_low", bounded("clip_low", epsilon))
    if reading.given.get("epsilon_high") is None and not _is_cispo(reading):
        reading.apply(name, "clip_high", epsilon)


def _epsilon_high(reading: Translation, name: str, value: Any) -> None:
    """How far above 1 a ratio may be, with every loss of ART's."""
    reading.apply(name, "clip_high", bounded("clip_high", number(value)))


def _scale_rewards(reading: Translation, name: str, value: Any) -> None:
    """`normalize_advantages=False` stands over `scale_rewards=True`, as with ART."""
    scales = boolean(value)
    if name == "scale_rewards" and reading.given.get("normalize_advantages") is False:
        return
    if name == "normalize_advantages" and scales and "scale_rewards" in reading.given:
        return
    reading.apply(name, "scale_rewards", scales)


def _kl_penalty(reading: Translation, name: str, value: Any) -> None:
    beta = bounded("kl_beta", number(value))
    reading.apply(name, "kl_beta", beta)
    if beta:
        reading.note(name, "as a term of the loss (train.kl_beta); ART lessens the advantages by it")


def _reference_step(reading: Translation, name: str, value: Any) -> None:
    if number(value) != 0:
        raise UnsupportedValueError("the reference is the model without its adapter, which is step 0")


def _off_at(*off: Any, why: str = _UNSUPPORTED) -> Handler:
    """Refused, but for the values that leave it off."""

    def act(reading: Translation, name: str, value: Any) -> None:
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in off):
            alternatives = " or ".join(repr(one) for one in off)
            raise UnsupportedValueError(
                f"{why}; leave it out" + (f", or {alternatives}" if alternatives else "")
            )

    return act


def _note(text: str, *silent: Any) -> Handler:
    """A note, except for values that match what happens anyway."""

    def act(reading: Translation, name: str, value: Any) -> None:
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in silent):
            reading.note(name, text)

    return act


_RATE = "the rate of a step is the one that is given, or by a schedule: give learning_rate for each train()"
_PACKED = "rows are packed as memory allows (train.pack_tokens), which changes no update"
_CHECKPOINTS = "each step is a checkpoint: it is what is served"
_OWN_LOGPROBS = "only what this run sampled is trained, and its logprobs are kept with each answer"
_REFERENCE = "the reference is the model without its adapter"
_OPTIMIZER = "the optimizer is AdamW, with PyTorch's own betas and epsilon"
_EXPERTS = "no model that routes to experts is trained here"

_APPLIED: dict[str, Handler] = {
    "learning_rate": _learning_rate,
    "loss_fn": _loss_fn,
    "ppo": _ppo,
    "importance_sampling_level": _level,
    "epsilon": _epsilon,
    "epsilon_high": _epsilon_high,
    "normalize_advantages": _scale_rewards,
    "scale_rewards": _scale_rewards,
    "kl_penalty_coef": _kl_penalty,
}
_CHECKED: dict[str, Handler] = {
    "loss_fn_config": _off_at(why="no loss here has settings of ART's"),
    "adam_params": _off_at(why=_OPTIMIZER),
    "kl_penalty_reference_step": _reference_step,
    "kl_ref_adapter_path": _off_at(why=_REFERENCE),
    "advantage_balance": _off_at(0, 0.0, why="an advantage is a reward less its group's mean here"),
    "mask_prob_ratio": _off_at(False, why="a ratio outside its bounds is clipped here"),
    "kimi_k2_tau": _off_at(),
    "scale_learning_rate_by_reward_std_dev": _off_at(False, why=_RATE),
    "num_trajectories_learning_rate_multiplier_power": _off_at(0, 0.0, why=_RATE),
    # Both bound how much a single ratio may count.
    "max_negative_advantage_importance_sampling_weight": must_equal(
        lambda it: it.train.resolved().dual_clip, "train.dual_clip"
    ),
    "truncated_importance_sampling": VALIDATED["vllm_importance_sampling_cap"],
    # Of `_internal_config`, where a model is registered.
    "peft_args": check_lora,
    "max_seq_length": VALIDATED["max_seq_length"],
    "moe_routing_replay_bundle": _off_at(why=_EXPERTS),
    "moe_routing_replay_path": _off_at(why=_EXPERTS),
}
_NOTED: dict[str, Handler] = {
    "precalculate_logprobs": _note(_OWN_LOGPROBS, False),
    "allow_training_without_logprobs": _note(_OWN_LOGPROBS, False),
    "plot_tensors": _note("no pictures are made; logs/rollouts has each step's texts", False),
    "logprob_calculation_chunk_size": _note("logprobs are computed in pieces as memory allows", 1024),
    "packed_sequence_length": _note(_PACKED),
    "grad_accumulation_sequences": _note("all samples of a step make one update"),
    "save_checkpoint": _note(_CHECKPOINTS, True),
    "verbose": _note("the trainer's output is in the run's logs", False),
    "moe_routing_replay_strict": _note(_EXPERTS),
}  # fmt: skip

ART: dict[str, Keyword] = {
    **{name: Keyword("applied", act) for name, act in _APPLIED.items()},
    **{name: Keyword("checked", act) for name, act in _CHECKED.items()},
    **{name: Keyword("noted", act) for name, act in _NOTED.items()},
}
