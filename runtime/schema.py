"""The HTTP bodies the two halves share, and the runtime's configuration.

Neighbours: the gateway answers with these, the client and the CLI send them.
Knows nothing of torch, vLLM, files or processes: pydantic only, so both halves can import it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

SCHEMA = 1

# Request headers. A program may instead use the base URL `/rollouts/<id>/v1`.
ROLLOUT_HEADER = "x-slipway-rollout"
PREDICTOR_HEADER = "x-slipway-predictor"
CALL_HEADER = "x-slipway-call"
# "eval": held-out evaluation, recorded apart and refused for training (C48).
PURPOSE_HEADER = "x-slipway-purpose"
# Stamped by the relay; the gateway answers a request id it has seen with the stored answer.
REQUEST_HEADER = "x-slipway-request"
# On every answer that sampled: the policy version that produced it.
VERSION_HEADER = "x-slipway-policy-version"

# `model_type` of the config.json of what is served and trained.
SUPPORTED_MODEL_TYPES = ("qwen2",)

CLIENT_STATE_MAX_BYTES = 64 * 1024


class Body(BaseModel):
    """A request body: an unknown key is an error, not a silent no-op."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Answer(BaseModel):
    """A response body: keys are only ever added, so readers ignore what they do not know."""

    model_config = ConfigDict(extra="ignore", frozen=True)


# ------------------------------------------------------------------ configuration


class LoraConfig(Body):
    """All-linear LoRA. Serving folds nothing: A and B stay apart from the base weights."""

    rank: int = Field(default=16, ge=1, le=256)
    alpha: float = Field(default=16.0, gt=0)


class TrainConfig(Body):
    """What one optimizer step does. Defaults follow the field's practice for GRPO with LoRA."""

    lora: LoraConfig = LoraConfig()
    learning_rate: float = Field(default=2e-5, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    loss: Literal["grpo"] = "grpo"
    clip_low: float = Field(default=0.2, gt=0)
    clip_high: float = Field(default=0.28, gt=0)
    kl_beta: float = Field(default=0.0, ge=0)
    scale_rewards: bool = False
    mask_truncated: bool = True
    pack_tokens: int = Field(default=4096, ge=16)
    seed: int = 0
    keep_checkpoints: int = Field(default=4, ge=2)


class EngineConfig(Body):
    """One vLLM server per inference GPU group (one, on the CPU)."""

    max_model_len: int | None = Field(default=None, ge=64)
    max_loras: int = Field(default=4, ge=3)
    max_num_seqs: int = Field(default=64, ge=1)
    memory_fraction: float | None = Field(default=None, gt=0, le=0.95)
    kv_cache_gib: float = Field(default=1.0, gt=0)


class RuntimeConfig(Body):
    """Everything the runtime is told, saved as `runtime.json` beside the run it configures.

    `model_path` is a local folder in Hugging Face form, or a hub name the runtime downloads.
    `state_dir` holds samples, steps, checkpoints, logs; `socket_dir` (0700, short path) the sockets.
    """

    run_id: str
    model_path: str
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
    train: TrainConfig = TrainConfig()
    engine: EngineConfig = EngineConfig()


# ------------------------------------------------------------------ steps


class Member(Body):
    """One rollout's part in a group: a reward for what it sampled, or the reason there is none.

    `predictor` and `call` narrow the reward to those samples of the rollout; without them it
    holds for every sample the rollout made. `reward` None excludes the member and counts
    `failure` (C22): an excluded reward is not a zero.
    """

    rollout: str = Field(min_length=1, max_length=128)
    predictor: str | None = None
    call: int | None = Field(default=None, ge=0)
    reward: float | None = None
    failure: str | None = None


class Group(Body):
    """Rollouts compared with one another: one example, and for DSPy one predictor of the program."""

    id: str = Field(min_length=1, max_length=128)
    predictor: str | None = None
    members: Annotated[list[Member], Field(min_length=1)]


class StepRequest(Body):
    """`POST /slipway/steps`. The same key with the same body is the same step; another body is 409."""

    key: str = Field(min_length=1, max_length=128)
    groups: Annotated[list[Group], Field(min_length=1)]
    client_state: dict[str, Any] | None = None


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
    retokenised: int = 0
    groups_without_variance: int = 0
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
    client_state: dict[str, Any] | None = None


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
