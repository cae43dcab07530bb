"""The HTTP bodies the two halves share, and the runtime's configuration.

Neighbours: the gateway answers with these, the client and the CLI send them.
Knows nothing of torch, vLLM, files or processes: pydantic only, so both halves can import it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, LiteralString, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

SCHEMA = 1

# Request headers. A program may instead use the base URL `/rollouts/<id>/v1`.
ROLLOUT_HEADER = "x-slipway-rollout"
PREDICTOR_HEADER = "x-slipway-predictor"
CALL_HEADER = "x-slipway-call"
# "eval": held-out evaluation, recorded apart and refused for training (C48).
PURPOSE_HEADER = "x-slipway-purpose"
# Stamped by the relay; the gateway answers a request id it has seen with the stored answer.
REQUEST_HEADER = "x-slipway-request"
# "follows": whoever asks will say whether the answer reached its client (`POST /slipway/receipts`).
RECEIPT_HEADER = "x-slipway-receipt"
RECEIPT_FOLLOWS = "follows"
# On every answer that sampled: the policy version that produced it.
VERSION_HEADER = "x-slipway-policy-version"

# What is served and trained: `model_type` of the config.json, and its `architectures`.
ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}
SUPPORTED_MODEL_TYPES = tuple(ARCHITECTURES)
# On an answer: fields of the request that had no effect here (a seed, on CPU; tools' `strict`, in a rollout).
IGNORED_HEADER = "x-slipway-ignored"

# A request has at most this, unpacked: both doors, the relay and the gateway, refuse more.
BODY_BYTES = 32 * 2**20
# Sampled tokens of a sequence by which a publication is proved: enough to tell, few enough to be quick.
PROBE_TOKENS = 256

CLIENT_STATE_MAX_BYTES = 64 * 1024
STATE_DEEPEST = 64


class Body(BaseModel):
    """A request body: an unknown key is an error, not a silent no-op."""

    # A reward that is no number must arrive as one: as null it would be a reward nobody gave.
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")


class Answer(BaseModel):
    """A response body: keys are only ever added, so readers ignore what they do not know."""

    model_config = ConfigDict(extra="ignore", frozen=True)


# ------------------------------------------------------------------ configuration


class LoraConfig(Body):
    """All-linear LoRA. Serving folds nothing: A and B stay apart from the base weights."""

    rank: int = Field(default=16, ge=1, le=256)
    alpha: float = Field(default=16.0, gt=0)


Normaliser = Literal["token", "sequence", "constant"]


@dataclass(frozen=True)
class LossDefaults:
    """What a loss means where nobody says otherwise."""

    normaliser: Normaliser
    scale_rewards: bool
    clip_low: float
    clip_high: float


# By `train.loss`. DeepSeekMath's own grpo (arXiv 2402.03300) is normaliser=sequence, scale_rewards=true,
# clip_high=0.2; here it starts from what became of it. Then Dr. GRPO (2503.20783), DAPO (2503.14476),
# CISPO of MiniMax-M1 (2506.13585; no lower bound, ratios up to 5) and GSPO (2507.18071). Common to all are
# `dual_clip`, 3 as in Ye et al. (1912.09729, equation 5), and `mismatch_cap`, 2 as in truncated importance
# sampling between engine and trainer (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You
# Off-Policy RL Training").
LOSSES = {
    "grpo": LossDefaults("token", scale_rewards=False, clip_low=0.2, clip_high=0.28),
    "dr_grpo": LossDefaults("constant", scale_rewards=False, clip_low=0.2, clip_high=0.2),
    "dapo": LossDefaults("token", scale_rewards=True, clip_low=0.2, clip_high=0.28),
    "cispo": LossDefaults("token", scale_rewards=True, clip_low=1.0, clip_high=4.0),
    "gspo": LossDefaults("sequence", scale_rewards=True, clip_low=3e-4, clip_high=4e-4),
}
_CONSTANT_TOKENS = 1024
# The type of a complaint about a key that means nothing beside another.
COMBINATION: LiteralString = "combination"


class TrainConfig(Body):
    """What one optimizer step does. Defaults follow the field's practice for GRPO with LoRA.

    None is the loss's own value (`resolved`). `normaliser`: a token counts 1 / the step's tokens, 1 / (the
    step's answers x its answer's tokens), or 1 / (the step's answers x `constant_tokens`). `overlong`: an
    answer cut off at its limit is left out (mask), kept as it is (keep), or kept while each answer is
    charged up to 1 over its last `overlong_buffer` of `overlong_tokens` tokens (soft; DAPO, equation 13).
    `dual_clip`: a ratio above it teaches nothing where the advantage is negative, and counts for no more in
    the KL term. `mismatch_cap`: a token weighs at most so many times more for being likelier to the trainer
    than the engine said.
    """

    lora: LoraConfig = LoraConfig()
    learning_rate: float = Field(default=2e-5, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    loss: Literal["grpo", "dr_grpo", "dapo", "cispo", "gspo"] = "grpo"
    normaliser: Normaliser | None = None
    constant_tokens: int | None = Field(default=None, ge=1)
    scale_rewards: bool | None = None
    clip_low: float | None = Field(default=None, gt=0)
    clip_high: float | None = Field(default=None, gt=0)
    dual_clip: float = Field(default=3.0, gt=1)
    mismatch_cap: float = Field(default=2.0, ge=1)
    kl_beta: float = Field(default=0.0, ge=0)
    overlong: Literal["mask", "keep", "soft"] = "mask"
    overlong_tokens: int | None = Field(default=None, ge=2)
    overlong_buffer: int | None = Field(default=None, ge=1)
    pack_tokens: int = Field(default=4096, ge=16)
    seed: int = 0
    # More than `max_staleness`, so that the adapter that sampled a stale answer is there to be asked.
    keep_checkpoints: int = Field(default=4, ge=2)

    def resolved(self) -> Self:
        """The same with the loss's own value wherever none was given."""
        own = LOSSES[self.loss]
        found = {name: getattr(self, name) for name in LossDefaults.__dataclass_fields__}
        found = {name: getattr(own, name) if value is None else value for name, value in found.items()}
        if found["normaliser"] == "constant":
            found["constant_tokens"] = self.constant_tokens or _CONSTANT_TOKENS
        if self.overlong_tokens is not None:
            found["overlong_buffer"] = self.overlong_buffer or max(1, self.overlong_tokens // 5)
        return self.model_copy(update=found)

    @model_validator(mode="after")
    def _combination_means_something(self) -> Self:
        for key, why in self._contradictions():
            raise PydanticCustomError(COMBINATION, "{why}", {"key": key, "why": why})
        return self

    def _contradictions(self) -> Iterator[tuple[str, str]]:
        """Keys that mean nothing beside the others, and why, with the way out."""
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
        if self.dual_clip <= 1 + high and self.loss != "cispo":
            yield "dual_clip", f"it lies inside the clip, which ends at {1 + high:g}: more than that"
        if self.overlong == "soft" and self.overlong_tokens is None:
            yield "overlong", "soft charges answers near a length: say which with train.overlong_tokens"
        for key in ("overlong_tokens", "overlong_buffer"):
            if getattr(self, key) is not None and self.overlong != "soft":
                yield key, f"it is not read with overlong={self.overlong}: train.overlong=soft"
        if self.overlong_tokens is not None and (self.overlong_buffer or 1) >= self.overlong_tokens:
            yield "overlong_buffer", "it is a part of overlong_tokens, so it must be less"


def complaint(error: ValidationError) -> tuple[str, str, str]:
    """The first thing that does not fit: its dotted key, pydantic's type of it, and why."""
    first = error.errors(include_url=False)[0]
    place = [str(part) for part in first["loc"]]
    if first["type"] == COMBINATION:
        place.append(first.get("ctx", {})["key"])
    return ".".join(place), first["type"], first["msg"][0].lower() + first["msg"][1:]


class EngineConfig(Body):
    """One vLLM server per inference GPU group (one, on the CPU)."""

    max_model_len: int | None = Field(default=None, ge=64)
    # The most tokens of a chat answer whose request names no limit of its own.
    answer_tokens: int = Field(default=4096, ge=1)
    max_loras: int = Field(default=4, ge=3)
    max_num_seqs: int = Field(default=64, ge=1)
    memory_fraction: float | None = Field(default=None, gt=0, le=0.95)
    kv_cache_gib: float = Field(default=1.0, gt=0)


class RuntimeConfig(Body):
    """Everything the runtime is told, saved as `runtime.json` beside the run it configures.

    `model_path` is a local folder in Hugging Face form, or a hub name the runtime downloads. `model_name` is
    what adapters call it, the same on every machine; None: what `model_path` says without its place.
    `state_dir` holds samples, steps, checkpoints, logs; `socket_dir` (0700, short path) the sockets.
    """

    run_id: str
    model_path: str
    model_name: str | None = None
    served_name: str = "policy"
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    engines: int = Field(default=1, ge=1)
    train_processes: int = Field(default=1, ge=1)
    state_dir: str
    socket_dir: str
    # A sample older than this many committed steps is dropped and counted, not trained (C39).
    max_staleness: int = Field(default=2, ge=0)
    lease_seconds: float = Field(default=60.0, gt=0)
    deadline_seconds: float | None = Field(default=None, gt=0)
    wandb_mode: Literal["disabled", "offline", "online"] = "disabled"
    wandb_project: str = "slipway"
    # How many completions of a step come home as text, with their rewards; 0 keeps none.
    completions_per_step: int = Field(default=64, ge=0, le=4096)
    train: TrainConfig = TrainConfig()
    engine: EngineConfig = EngineConfig()


# ------------------------------------------------------------------ steps


class Member(Body):
    """One rollout's part in a group: a reward for what it sampled, or the reason there is none.

    What it sampled is named in one of three ways: by `rollout`, the tag of its requests; by `messages` and
    `completion`, the question as it was asked and the text of the answer, for clients that cannot tag; by
    `sample`, the id of one sample. `predictor` and `call` narrow the reward to those samples of the rollout;
    without them it holds for every sample the rollout made. `reward` None excludes the member and counts
    `failure` (C22): an excluded reward is not a zero.
    """

    rollout: str = Field(default="", max_length=128)
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    completion: str | None = None
    sample: str | None = Field(default=None, min_length=1, max_length=256)
    predictor: str | None = None
    call: int | None = Field(default=None, ge=0)
    reward: float | None = None
    failure: str | None = None

    @model_validator(mode="after")
    def _is_about_one_thing(self) -> Self:
        named = [bool(self.rollout), self.messages is not None, self.sample is not None]
        if sum(named) != 1 or (self.messages is None) != (self.completion is None):
            raise ValueError("a member names a rollout, or messages and their completion, or a sample")
        return self


class Group(Body):
    """Rollouts compared with one another: one example, and for DSPy one predictor of the program."""

    id: str = Field(min_length=1, max_length=128)
    predictor: str | None = None
    members: Annotated[list[Member], Field(min_length=1)]


def _plain_json(state: dict[str, Any] | None) -> dict[str, Any] | None:
    """What every reader of the state can read: finite numbers, whole characters, nesting with an end."""
    level: list[Any] = [state]
    for _ in range(STATE_DEEPEST):
        level = [child for node in level for child in _children(node)]
    if level:
        raise ValueError(f"nested more than {STATE_DEEPEST} deep")
    json.dumps(state, allow_nan=False, ensure_ascii=False).encode()
    return state


def _children(node: Any) -> list[Any]:
    return list(node.values()) if isinstance(node, dict) else node if isinstance(node, list) else []


ClientState = Annotated[dict[str, Any] | None, AfterValidator(_plain_json)]


class StepRequest(Body):
    """`POST /slipway/steps`. The same key with the same body is the same step; another body is 409."""

    key: str = Field(min_length=1, max_length=128)
    groups: Annotated[list[Group], Field(min_length=1)]
    client_state: ClientState = None


StepState = Literal["queued", "training", "committed", "published", "failed"]


class StepCounts(Answer):
    """What became of everything a step named: trained + the sum of `dropped` = samples + missing.

    `dropped` maps a reason to a number of samples (or of members, where no sample was found).
    """

    groups: int = 0
    members: int = 0
    samples: int = 0
    trained: int = 0
    sampled_tokens: int = 0
    # Given as text that no answer matched: trained on the engine's ids of that text, not on what was sampled.
    retokenised: int = 0
    # Samples that go on from an earlier turn id for id, and are trained in one sequence with it.
    turns_joined: int = 0
    # How often a rollout's next sample did not go on from the last, and began a sequence of its own.
    sealed: int = 0
    groups_without_variance: int = 0
    # Answers that nobody is known to have received: no samples, so not among `samples` either.
    unreceived: int = 0
    dropped: dict[str, int] = {}


class StepStatus(Answer):
    """`GET /slipway/steps/{id}?wait=30`: answers once published or failed, or when the wait ends."""

    id: int
    key: str
    state: StepState
    version: int | None = None
    counts: StepCounts = StepCounts()
    metrics: dict[str, float] = {}
    publication: dict[str, Any] | None = None
    error: str | None = None


class CheckpointInfo(Answer):
    """One committed checkpoint."""

    name: str
    step: int
    version: int
    created: float
    bytes: int
    pinned: bool = False
    client_state: dict[str, Any] | None = None
    metrics: dict[str, float] = {}


class RestoreRequest(Body):
    """`POST /slipway/checkpoints/{name}/restore`: serve a kept checkpoint as a new version.

    Without `client_state` the program's place becomes the checkpoint's as well.
    """

    key: str = Field(min_length=1, max_length=128)
    client_state: ClientState = None


class ChildState(Answer):
    """One child of the supervisor."""

    name: str
    state: Literal["starting", "ready", "restarting", "failed", "stopped"]
    pid: int | None = None
    restarts: int = 0
    detail: str | None = None


class RuntimeStatus(Answer):
    """`GET /slipway/status`."""

    run_id: str
    phase: Literal["starting", "ready", "degraded", "failed", "stopping"]
    model: str
    served_name: str
    version: int
    step: int
    steps_queued: int = 0
    children: list[ChildState] = []
    lease_left_seconds: float | None = None
    client_state: dict[str, Any] | None = None
    last_metrics: dict[str, float] = {}
    samples: int = 0
    detail: str | None = None
