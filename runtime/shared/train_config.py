"""The one table of the training settings: the keys under `train.`, each loss's defaults, the contradictions.

All else is derived from it: the settings of one step and of its update (`schema.py`, `step_settings.py`), the
recipe's keys, the keywords of other trainers that mean the same, and the types of the client (`python -m
tests.generate`). Neighbours: `runtime_config.py` has the rest of the runtime's
configuration and puts this into it. pydantic only, so that both halves can import it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal, LiteralString, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError


class ConfigSection(BaseModel):
    """A part of the configuration: an unknown key is an error, not a silent no-op."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True)
class Use:
    """The use of a setting.

    `part`: the part of a step that reads it; of "rewards" and "loss", a step that learns from examples reads
    the second alone. None: it is fixed when the run starts. `per_step`: one step may have its own value.
    `belongs_to`: the settings to whose value it belongs: a step that chooses another value there does not
    take the run's value here. `aliases`: its names in other trainers.
    """

    part: Literal["optimizer", "loss", "rewards"] | None = None
    per_step: bool = True
    belongs_to: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()


def _split_names(value: object) -> object:
    """Names in one text, as a command line has them: "q_proj,v_proj"."""
    return tuple(name.strip() for name in value.split(",")) if isinstance(value, str) else value


class LoraConfig(ConfigSection):
    """LoRA, as PEFT's LoraConfig words it. Serving folds nothing: A and B stay apart from the base weights.

    The update is (alpha / rank) B A, with `use_rslora` (alpha / sqrt(rank)) B A. `target_modules`: the names
    of the linear layers that have it (`q_proj`, ...); None: all of the blocks, of experts those of attention.
    """

    rank: Annotated[int, Use(aliases=("r", "lora_rank"))] = Field(default=16, ge=1, le=256)
    alpha: Annotated[float, Use(aliases=("lora_alpha",))] = Field(default=16.0, gt=0)
    use_rslora: bool = False
    target_modules: Annotated[tuple[str, ...] | None, BeforeValidator(_split_names)] = Field(
        default=None, min_length=1
    )


Normaliser = Literal["token", "sequence", "constant"]
Loss = Literal["grpo", "dr_grpo", "dapo", "cispo", "gspo"]
Overlong = Literal["mask", "keep", "soft"]
Schedule = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True)
class LossDefaults:
    """A loss's default settings."""

    normaliser: Normaliser
    scale_rewards: bool
    clip_low: float
    clip_high: float


# By `train.loss`. DeepSeekMath's own grpo (arXiv 2402.03300) is normaliser=sequence, clip_high=0.2; here it
# starts from its later form, with rewards over their group's deviation as in the paper. Then Dr. GRPO
# (2503.20783), DAPO (2503.14476), CISPO of MiniMax-M1 (2506.13585; no lower bound, ratios up to 5) and GSPO
# (2507.18071). Common to all are `dual_clip`, 3 as in Ye et al. (1912.09729, equation 5), and `mismatch_cap`,
# 2 as in truncated importance sampling between engine and trainer (Yao et al. 2025, "Your Efficient RL
# Framework Secretly Brings You Off-Policy RL Training").
LOSSES = {
    "grpo": LossDefaults("token", scale_rewards=True, clip_low=0.2, clip_high=0.28),
    "dr_grpo": LossDefaults("constant", scale_rewards=False, clip_low=0.2, clip_high=0.2),
    "dapo": LossDefaults("token", scale_rewards=True, clip_low=0.2, clip_high=0.28),
    "cispo": LossDefaults("token", scale_rewards=True, clip_low=1.0, clip_high=4.0),
    "gspo": LossDefaults("sequence", scale_rewards=True, clip_low=3e-4, clip_high=4e-4),
}
# Engines serve no adapter on them that prompts could be scored with (C14).
_NO_TARGETS = ("lm_head", "embed_tokens")
_CONSTANT_TOKENS = 1024
_DUAL_CLIP = 3.0
# The type of a complaint about a key that means nothing beside another.
COMBINATION: LiteralString = "combination"


class TrainConfig(ConfigSection):
    """The settings of one optimizer step. Defaults follow the field's practice for GRPO with LoRA.

    None is the loss's own value (`resolved`). `normaliser`: a token counts 1 / the step's tokens, 1 / (the
    step's answers x its answer's tokens), or 1 / (the step's answers x `constant_tokens`). `scale_rewards`:
    advantages are divided by their group's deviation. `clip_low`, `clip_high`: ratios are cut to 1 - clip_low
    and 1 + clip_high. `kl_beta`: the weight of the k3 KL divergence to the base (the adapter off); 0 leaves
    out its forward pass. `max_grad_norm`: the gradient's norm is cut to it. `pack_tokens`: the tokens, with
    padding, of one forward pass. `seed`: of the adapter's start. `overlong`: an
    answer cut off at its limit is left out (mask), kept as it is (keep), or kept while each answer is charged
    up to 1 over its last `overlong_buffer` of `overlong_tokens` tokens (soft; DAPO, equation 13).
    `dual_clip`: a ratio above it teaches nothing if the advantage is negative, and counts for no more in the
    KL term; None is 3, or the end of a wider clip. `mismatch_cap`: the largest weight of a token for being
    likelier to the trainer than to the engine. `schedule`: after `warmup_steps` steps in which it rises to
    its value, `learning_rate` stays (constant) or falls to 0 at step `schedule_steps`.
    """

    lora: LoraConfig = LoraConfig()
    learning_rate: Annotated[float, Use("optimizer", aliases=("lr",))] = Field(
        default=2e-5, gt=0, allow_inf_nan=False
    )
    schedule: Annotated[Schedule, Use("optimizer")] = "constant"
    warmup_steps: Annotated[int, Use("optimizer")] = Field(default=0, ge=0)
    schedule_steps: Annotated[int | None, Use("optimizer", belongs_to=("schedule",))] = Field(
        default=None, ge=1
    )
    weight_decay: Annotated[float, Use("optimizer")] = Field(default=0.0, ge=0, allow_inf_nan=False)
    max_grad_norm: Annotated[float, Use("optimizer")] = Field(default=1.0, gt=0)
    loss: Annotated[Loss, Use("rewards", aliases=("loss_type",))] = "grpo"
    normaliser: Annotated[Normaliser | None, Use("loss", belongs_to=("loss",))] = None
    constant_tokens: Annotated[
        int | None, Use("rewards", per_step=False, belongs_to=("loss", "normaliser"))
    ] = Field(default=None, ge=1)
    scale_rewards: Annotated[bool | None, Use("rewards", belongs_to=("loss",))] = None
    clip_low: Annotated[float | None, Use("rewards", belongs_to=("loss",), aliases=("epsilon",))] = Field(
        default=None, gt=0
    )
    clip_high: Annotated[float | None, Use("rewards", belongs_to=("loss",), aliases=("epsilon_high",))] = (
        Field(default=None, gt=0)
    )
    dual_clip: Annotated[float | None, Use("rewards", per_step=False, belongs_to=("loss",))] = Field(
        default=None, gt=1
    )
    mismatch_cap: Annotated[float, Use("rewards", per_step=False)] = Field(default=2.0, ge=1)
    kl_beta: Annotated[float, Use("loss", aliases=("beta", "kl_coef"))] = Field(default=0.0, ge=0)
    overlong: Annotated[Overlong, Use("rewards")] = "mask"
    overlong_tokens: Annotated[int | None, Use("rewards", belongs_to=("overlong",))] = Field(
        default=None, ge=2
    )
    overlong_buffer: Annotated[int | None, Use("rewards", belongs_to=("overlong",))] = Field(
        default=None, ge=1
    )
    pack_tokens: int = Field(default=4096, ge=16)
    # Layers compute their insides again in the backward pass; None: where memory asks for it, on GPUs.
    activation_checkpointing: bool | None = None
    seed: int = 0
    # As many as there are versions whose samples are trained (`max_staleness` and the newest) in any case.
    keep_checkpoints: int = Field(default=4, ge=2)

    def resolved(self) -> ResolvedTrainConfig:
        """The same with the loss's own value wherever none was given."""
        own = LOSSES[self.loss]
        found = {name: getattr(self, name) for name in LossDefaults.__dataclass_fields__}
        found = {name: getattr(own, name) if value is None else value for name, value in found.items()}
        if found["normaliser"] == "constant":
            found["constant_tokens"] = self.constant_tokens or _CONSTANT_TOKENS
        end_of_clip = 1 + found["clip_high"] if self.loss != "cispo" else 0.0
        found["dual_clip"] = self.dual_clip or max(_DUAL_CLIP, end_of_clip)
        if self.overlong_tokens is not None:
            found["overlong_buffer"] = self.overlong_buffer or max(1, self.overlong_tokens // 5)
        return ResolvedTrainConfig.model_construct(**(dict(self) | found))

    @model_validator(mode="after")
    def _combination_means_something(self) -> Self:
        for key, why in self._contradictions():
            raise PydanticCustomError(COMBINATION, "{why}", {"key": key, "why": why})
        return self

    def _contradictions(self) -> Iterator[tuple[str, str]]:
        """Keys that mean nothing beside the others, and why, with the way out."""
        for name in self.lora.target_modules or ():
            if name in _NO_TARGETS:
                yield "lora.target_modules", f"{name} cannot have LoRA here: linear layers of the blocks can"
        normaliser = self.normaliser or LOSSES[self.loss].normaliser
        if self.loss == "gspo" and normaliser != "sequence":
            yield "normaliser", "gspo clips whole answers, so each must count once: normaliser=sequence"
        if self.loss == "dr_grpo" and normaliser == "sequence":
            yield "normaliser", "dr_grpo is grpo without a division by the answer's length: loss=grpo has it"
        if self.loss == "dr_grpo" and self.scale_rewards:
            yield "scale_rewards", "dr_grpo is grpo without a division by the deviation: loss=grpo has it"
        if self.constant_tokens is not None and normaliser != "constant":
            yield "constant_tokens", f"nothing is divided by it with normaliser={normaliser}"
        if self.clip_low is not None and self.clip_low >= 1 and self.loss != "cispo":
            yield "clip_low", f"a ratio is never below 0, so {self.loss} would clip nothing: less than 1"
        high = LOSSES[self.loss].clip_high if self.clip_high is None else self.clip_high
        if self.dual_clip is not None and self.dual_clip < 1 + high and self.loss != "cispo":
            yield "dual_clip", f"it lies inside the clip, which ends at {1 + high:g}: no less than that"
        if self.overlong == "soft" and self.overlong_tokens is None:
            yield "overlong", "soft charges answers near a length: say which with train.overlong_tokens"
        for key in ("overlong_tokens", "overlong_buffer"):
            if getattr(self, key) is not None and self.overlong != "soft":
                yield key, f"it is not read with overlong={self.overlong}: train.overlong=soft"
        if self.overlong_tokens is not None and (self.overlong_buffer or 1) >= self.overlong_tokens:
            yield "overlong_buffer", "it is a part of overlong_tokens, so it must be less"
        yield from self._contradictions_of_schedule()

    def _contradictions_of_schedule(self) -> Iterator[tuple[str, str]]:
        if self.schedule == "constant" and self.schedule_steps is not None:
            yield "schedule_steps", "nothing ends there with schedule=constant: linear and cosine fall to 0"
        if self.schedule != "constant" and self.schedule_steps is None:
            yield "schedule", f"{self.schedule} falls to 0 at a step: say which with train.schedule_steps"
        if self.schedule_steps is not None and self.warmup_steps >= self.schedule_steps:
            yield "warmup_steps", "the rate falls to 0 at schedule_steps, so its rise must end before"


class ResolvedTrainConfig(TrainConfig):
    """`TrainConfig.resolved()`, in the types that it has then: nothing that the loss decides is None."""

    normaliser: Normaliser
    scale_rewards: bool
    clip_low: float
    clip_high: float
    dual_clip: float


def use_of(model: type[ConfigSection], name: str) -> Use:
    """The use of a setting; of one without a mark, a run's."""
    marks = (it for it in model.model_fields[name].metadata if isinstance(it, Use))
    return next(marks, Use(per_step=False))


def settings_of(*parts: str) -> tuple[str, ...]:
    """The names of the settings that these parts of a step read, in their order."""
    return tuple(name for name in TrainConfig.model_fields if use_of(TrainConfig, name).part in parts)


def per_step_settings() -> tuple[str, ...]:
    """The names of the settings that one step may have its own value of."""
    found = ((name, use_of(TrainConfig, name)) for name in TrainConfig.model_fields)
    return tuple(name for name, use in found if use.part is not None and use.per_step)


def aliases() -> dict[str, str]:
    """The names that other trainers have for settings, each with ours."""
    models = (TrainConfig, LoraConfig)
    return {
        alias: name
        for model in models
        for name in model.model_fields
        for alias in use_of(model, name).aliases
    }


def first_error(error: ValidationError) -> tuple[str, str, str]:
    """The first invalid key, dotted, with pydantic's type of the error, and the reason."""
    first = error.errors(include_url=False)[0]
    place = [str(part) for part in first["loc"]]
    if first["type"] == COMBINATION:
        place.append(first.get("ctx", {})["key"])
    return ".".join(place), first["type"], first["msg"][0].lower() + first["msg"][1:]
