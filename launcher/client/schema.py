"""The bodies the client sends and reads, its own copy: a user's own `runtime` module beside the program hides
none.

Neighbours: `runtime/shared/schema.py` and `statuses.py` have the runtime's, and a test compares; `wire.py`
and `connection.py` send these. A request has exactly the runtime's keys, a response at most those. Knows
nothing of HTTP or of DSPy, and imports pydantic, and `base/sanitize.py` for printed text.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, model_validator

from launcher.base.sanitize import one_line as sanitized

ROLLOUT_HEADER = "x-slipway-rollout"
PREDICTOR_HEADER = "x-slipway-predictor"
CALL_HEADER = "x-slipway-call"
# "eval": held-out evaluation, recorded apart and refused for training (C48).
PURPOSE_HEADER = "x-slipway-purpose"
# The gateway answers a request id it has seen with the stored answer.
REQUEST_HEADER = "x-slipway-request"
# On every answer that sampled: the policy version that produced it.
VERSION_HEADER = "x-slipway-policy-version"

CLIENT_STATE_MAX_BYTES = 64 * 1024
STATE_DEEPEST = 64
# A supervised step has at most so many.
MOST_EXAMPLES = 4096


class RequestBody(BaseModel):
    """A request body: an unknown key is an error, not a silent no-op."""

    # A reward that is no number must arrive as one: as null it would be a missing reward.
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")


class ResponseBody(BaseModel):
    """A response body: keys are only ever added, so an unknown one is ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)


# ------------------------------------------------------------------ requests


SampleId = Annotated[str, Field(min_length=1, max_length=256)]
# Of one member: the turns of one conversation.
MOST_SAMPLES = 4096


class Member(RequestBody):
    """One rollout's part in a group: a reward for its samples, or the reason there is none.

    Its samples are named by `rollout`, by `messages` and `completion` or `tool_calls`, or by `sample` or
    `samples`; `predictor` and `call` narrow the reward to those samples. `reward` None excludes the member
    and counts `failure` (C22).
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


class Group(RequestBody):
    """Rollouts compared with one another: one example, and for DSPy one predictor of the program."""

    id: str = Field(min_length=1, max_length=128)
    predictor: str | None = None
    members: Annotated[list[Member], Field(min_length=1)]


def _plain_json(state: dict[str, Any] | None) -> dict[str, Any] | None:
    """Check that every reader can read the state: finite numbers, whole characters, bounded nesting."""
    level: list[Any] = [state]
    for _ in range(STATE_DEEPEST):
        level = [child for node in level for child in _nested_values(node)]
    if level:
        raise ValueError(f"nested more than {STATE_DEEPEST} deep")
    json.dumps(state, allow_nan=False, ensure_ascii=False).encode()
    return state


def _nested_values(node: Any) -> list[Any]:
    return list(node.values()) if isinstance(node, dict) else node if isinstance(node, list) else []


ClientState = Annotated[dict[str, Any] | None, AfterValidator(_plain_json)]


Schedule = Literal["constant", "linear", "cosine"]
Loss = Literal["grpo", "dr_grpo", "dapo", "cispo", "gspo"]
Normaliser = Literal["token", "sequence", "constant"]
Overlong = Literal["mask", "keep", "soft"]


class StepSettings(RequestBody):
    """Settings of one step that override the run's own `train.` keys; None: the run's value (C60).

    The names are those of TrainConfig. `learning_rate` rises to its value over `warmup_steps` steps; after
    them `schedule` keeps it constant, or lets it fall to 0 at step `schedule_steps` (linear, cosine).
    `schedule_step` is this step's place in the schedule, 0 is the first; None counts the run's steps.
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


class SupervisedExample(RequestBody):
    """A conversation to learn from, as OpenAI's fine-tuning files have it: each answer is learned.

    An assistant's message with `"weight": 0` is not. `tools` are those that the conversation was held with.
    """

    messages: Annotated[list[dict[str, Any]], Field(min_length=2)]
    tools: list[dict[str, Any]] | None = None


class StepRequest(RequestBody):
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


class Validation(RequestBody):
    """`POST /slipway/validations`: a held-out score. The same compile, step and name is the same validation.

    `step`: the number of steps that the compile had taken. `version`: the policy that was scored; None: the
    served one.
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


class RestoreRequest(RequestBody):
    """`POST /slipway/checkpoints/{name}/restore`: serve a kept checkpoint as a new version."""

    key: str = Field(min_length=1, max_length=128)
    client_state: ClientState = None


# ------------------------------------------------------------------ responses

StepState = Literal["queued", "training", "committed", "published", "failed"]


class StepCounts(ResponseBody):
    """The counts of everything a step named: trained + the sum of `dropped` = samples + missing.

    `samples`: answers that the step named; each is in `trained` or in `dropped`. `dropped` maps a reason to a
    number of them (or of members, if no sample was found). `sampled_tokens`: in a step with rewards, tokens
    of the answers that were trained. `learned_tokens`: in a supervised step, tokens of its examples' answers;
    0 in a step with rewards.
    """

    groups: int = 0
    members: int = 0
    samples: int = 0
    trained: int = 0
    sampled_tokens: int = 0
    learned_tokens: int = 0
    # Answers given as text that no sample matched: trained on the engine's token ids for that text, not on
    # sampled ones.
    retokenised: int = 0
    turns_joined: int = 0
    sealed: int = 0
    sealed_by: dict[str, int] = {}
    groups_without_variance: int = 0
    # Answers without a receipt: no samples, so not among `samples` either.
    unreceived: int = 0
    dropped: dict[str, int] = {}


class StepStatus(ResponseBody):
    """`GET /slipway/steps/{id}?wait=30`: answers once published or failed, or when the wait ends."""

    id: int
    key: str
    state: StepState
    version: int | None = None
    counts: StepCounts = StepCounts()
    metrics: dict[str, float] = {}
    publication: dict[str, Any] | None = None
    error: str | None = None

    def __repr__(self) -> str:
        """Short: the counts and metrics are fields of it."""
        served = "not published" if self.version is None else f"v{self.version}"
        reward = self.metrics.get("reward")
        parts = [
            f"step {self.id}",
            self.state,
            served,
            f"trained {self.counts.trained} of {self.counts.samples}",
        ]
        parts += [] if reward is None else [f"reward {reward:.3f}"]
        parts += [self.error] if self.error else []
        return sanitized(f"<{' · '.join(parts)}>")

    __str__ = __repr__


class CheckpointInfo(ResponseBody):
    """One committed checkpoint."""

    name: str
    step: int
    version: int
    created: float
    bytes: int
    # sha256 of the adapter's weights file.
    weights: str = ""
    pinned: bool = False
    # In the answer to a pin: the checkpoints that are pinned no longer, as so many have been since.
    let_go: list[str] = []
    client_state: dict[str, Any] | None = None
    metrics: dict[str, float] = {}


class ChildState(ResponseBody):
    """One child of the runtime's supervisor."""

    name: str
    state: Literal["starting", "ready", "restarting", "failed", "stopped"]
    pid: int | None = None
    restarts: int = 0
    detail: str | None = None


class RuntimeStatus(ResponseBody):
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
    # The run's own `train.` settings that a step may change (StepSettings).
    settings: dict[str, Any] = {}
    # A sample older than so many steps is not trained.
    max_staleness: int | None = None
    # How many sequences all engines sample at a time.
    places: int | None = None
    samples: int = 0
    # Of the tokens of all prompts so far, the share that was in a prefix cache.
    prefix_cache_hits: float | None = None
    detail: str | None = None
    warnings: list[str] = []
