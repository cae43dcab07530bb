"""The HTTP bodies the two halves share, and the runtime's configuration.

Neighbours: the gateway answers with these, client and CLI send them; `train_config.py` has what is under
`train.`. Knows nothing of torch, vLLM, files or processes: pydantic only, so both halves can import it.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, model_validator

from runtime.shared.train_config import Loss, Normaliser, Overlong, Schedule, TrainConfig

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
# So many receipts at a time.
MOST_RECEIPTS = 4096
# On every answer that sampled: the policy version that produced it.
VERSION_HEADER = "x-slipway-policy-version"

# A request has at most this, unpacked: both doors, the relay and the gateway, refuse more.
BODY_BYTES = 32 * 2**20

CLIENT_STATE_MAX_BYTES = 64 * 1024
STATE_DEEPEST = 64
# A supervised step has at most so many.
MOST_EXAMPLES = 4096


class Body(BaseModel):
    """A request body: an unknown key is an error, not a silent no-op."""

    # A reward that is no number must arrive as one: as null it would be a reward nobody gave.
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")


class Answer(BaseModel):
    """A response body: keys are only ever added, so readers ignore what they do not know."""

    model_config = ConfigDict(extra="ignore", frozen=True)


# ------------------------------------------------------------------ configuration


class EngineConfig(Body):
    """One vLLM server per inference GPU group (one, on the CPU)."""

    max_model_len: int | None = Field(default=None, ge=64)
    # The most tokens of a chat answer whose request names no limit of its own.
    answer_tokens: int = Field(default=4096, ge=1)
    max_loras: int = Field(default=4, ge=3)
    # How many sequences an engine samples at a time; None: 64 on a CPU, vLLM's own default on a GPU.
    max_num_seqs: int | None = Field(default=None, ge=1)
    memory_fraction: float | None = Field(default=None, gt=0, le=0.95)
    # Of keys and values; None: 1 on a CPU, on a GPU what vLLM finds left of its fraction.
    kv_cache_gib: float | None = Field(default=None, gt=0)


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
    # How long engines and trainer may take to become ready, which a model that must come first decides.
    start_seconds: float = Field(default=1800.0, gt=0)
    wandb_mode: Literal["disabled", "offline", "online"] = "disabled"
    wandb_project: str = "slipway"
    wandb_name: str | None = None  # there; None is the run's id
    # How many completions of a step go to Weights & Biases as well, where the run does; 0: no texts go there.
    wandb_completions: int = Field(default=0, ge=0, le=64)
    # How many completions of a step come home as text, with their rewards; 0 keeps none.
    completions_per_step: int = Field(default=64, ge=0, le=4096)
    # Whether each choice of an answer has `slipway: {sample, version}`, by which it can be rewarded.
    name_samples: bool = True
    # Whether a turn goes on from the ids of the turn before, where its client sends the same text again.
    continue_turns: bool = True
    train: TrainConfig = TrainConfig()
    engine: EngineConfig = EngineConfig()


# ------------------------------------------------------------------ steps


SampleId = Annotated[str, Field(min_length=1, max_length=256)]
# Of one member: the turns of one conversation.
MOST_SAMPLES = 4096


class Member(Body):
    """One rollout's part in a group: a reward for what it sampled, or the reason there is none.

    What it sampled is named in one of three ways: by `rollout`, the tag of its requests; by `messages` and
    `completion` or `tool_calls` or both, the question as it was asked and what the answer's message had, for
    clients that cannot tag; by `sample` or `samples`, the ids as the answers said them: all answers of one
    conversation are one member. `predictor` and `call` narrow the reward to those samples of the rollout;
    without them it holds for every sample the rollout made. `reward` None excludes the member and counts
    `failure` (C22): an excluded reward is not a zero.
    """

    rollout: str = Field(default="", max_length=128)
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    completion: str | None = None
    tool_calls: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    sample: SampleId | None = None
    samples: Annotated[list[SampleId], Field(min_length=1, max_length=MOST_SAMPLES)] | None = None
    predictor: str | None = None
    call: int | None = Field(default=None, ge=0)
    reward: float | None = None
    failure: str | None = None

    @model_validator(mode="after")
    def _is_about_one_thing(self) -> Self:
        ids = self.sample is not None, self.samples is not None
        named = [bool(self.rollout), self.messages is not None, *ids]
        answered = self.completion is not None or self.tool_calls is not None
        if sum(named) != 1 or (self.messages is not None) != answered:
            raise ValueError("a member must have a rollout, or messages and a completion, or samples")
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


class StepSettings(Body):
    """What one step does otherwise than the run's own `train.` keys say; None: as the run says (C60).

    The names are those of TrainConfig. `schedule` is what becomes of `learning_rate` after `warmup_steps`
    steps in which it rises to its value: constant, or falling to 0 at step `schedule_steps` (linear, cosine).
    `schedule_step` is where in it this step is, 0 is the first; None counts the run's steps.
    """

    learning_rate: float | None = Field(default=None, gt=0)
    schedule: Schedule | None = None
    warmup_steps: int | None = Field(default=None, ge=0)
    schedule_steps: int | None = Field(default=None, ge=1)
    schedule_step: int | None = Field(default=None, ge=0)
    weight_decay: float | None = Field(default=None, ge=0)
    max_grad_norm: float | None = Field(default=None, gt=0)
    loss: Loss | None = None
    normaliser: Normaliser | None = None
    scale_rewards: bool | None = None
    clip_low: float | None = Field(default=None, gt=0)
    clip_high: float | None = Field(default=None, gt=0)
    kl_beta: float | None = Field(default=None, ge=0)
    overlong: Overlong | None = None
    overlong_tokens: int | None = Field(default=None, ge=2)
    overlong_buffer: int | None = Field(default=None, ge=1)


class SupervisedExample(Body):
    """A conversation to learn from, as OpenAI's fine-tuning files have it: each answer is learned.

    An assistant's message with `"weight": 0` is not. `tools` are those that the conversation was held with.
    """

    messages: Annotated[list[dict[str, Any]], Field(min_length=2)]
    tools: list[dict[str, Any]] | None = None


class StepRequest(Body):
    """`POST /slipway/steps`. The same key with the same body is the same step; another body is 409.

    A step learns from `groups`, by their rewards, or from `examples`, by imitation: one of the two.
    """

    key: str = Field(min_length=1, max_length=128)
    groups: list[Group] = []
    examples: Annotated[list[SupervisedExample], Field(max_length=MOST_EXAMPLES)] = []
    settings: StepSettings | None = None
    client_state: ClientState = None

    @model_validator(mode="after")
    def _learns_from_one_thing(self) -> Self:
        if bool(self.groups) == bool(self.examples):
            raise ValueError("a step must have groups, or examples, and not both")
        return self


class Validation(Body):
    """`POST /slipway/validations`: a held-out score. The same compile, step and name is the same validation.

    `step`: how many steps the compile had taken. `version`: the policy that was scored; None: what is served.
    """

    compile: str = Field(default="", max_length=64)
    step: int = Field(ge=0)
    name: str = Field(default="score", pattern=r"^[\w.-]{1,64}$")
    score: float = Field(allow_inf_nan=False)
    standard_error: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    examples: int | None = Field(default=None, ge=0)
    parse_rate: float | None = Field(default=None, ge=0, le=1)
    cut_off_rate: float | None = Field(default=None, ge=0, le=1)
    predictors: Annotated[dict[str, FiniteFloat], Field(max_length=256)] = {}
    version: int | None = Field(default=None, ge=0)


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
    # Of a supervised step, whose `samples` are the answers that its examples have: tokens of those it learns.
    learned_tokens: int = 0
    # Given as text that no answer matched: trained on the engine's ids of that text, not on what was sampled.
    retokenised: int = 0
    # Samples that go on from an earlier turn id for id, and are trained in one sequence with it.
    turns_joined: int = 0
    # How often a rollout's next sample did not go on from the last, and began a sequence of its own; why.
    sealed: int = 0
    sealed_by: dict[str, int] = {}
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
    # sha256 of the adapter's weights file: `policy@v12+` and its beginning name these weights alone.
    weights: str = ""
    pinned: bool = False
    let_go: list[str] = []  # in the answer to a pin: those pinned no longer, as so many have been since
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
    settings: dict[str, Any] = {}  # what the run's own `train.` keys say, of those that a step may change
    max_staleness: int | None = None  # a sample that is more steps old is not trained
    places: int | None = None  # how many sequences all engines sample at a time
    samples: int = 0
    prefix_cache_hits: float | None = None  # of the tokens of all prompts so far, the share that was cached
    admission: dict[str, Any] | None = None  # as admission.json: whether engine and trainer agree
    detail: str | None = None
    warnings: list[str] = []
