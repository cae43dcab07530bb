"""The bodies that the client sends. `python -m tests.generate` makes this file: do not edit it.

Neighbours: it is a copy of `runtime/shared/schema.py`, with the settings of a step from
`runtime/shared/train_config.py`; `schema.py` has what the client reads. Imports pydantic only.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self, TypedDict

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

# Request headers. A program may instead use the base URL `/rollouts/<id>/v1`.
ROLLOUT_HEADER = "x-slipway-rollout"
# At the base URL `/rollouts/x-session-id/v1`: the rollout's name, from clients that send one for an episode.
SESSION_HEADER = "x-session-id"
PREDICTOR_HEADER = "x-slipway-predictor"
CALL_HEADER = "x-slipway-call"
# "eval": held-out evaluation, recorded apart and refused for training (C48).
PURPOSE_HEADER = "x-slipway-purpose"
# Stamped by the relay; the gateway answers a request id it has seen with the stored answer.
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
    """A response body: keys are only ever added, so readers ignore unknown ones."""

    model_config = ConfigDict(extra="ignore", frozen=True)


# ------------------------------------------------------------------ steps


SampleId = Annotated[str, Field(min_length=1, max_length=256)]
# Of one member: the turns of one conversation.
MOST_SAMPLES = 4096
MetricName = Annotated[str, Field(min_length=1, max_length=64)]
MAX_METRICS = 32


class Member(RequestBody):
    """One rollout's part in a group: a reward for its samples, or the reason there is none.

    Its samples are named in one of three ways. `rollout` is the tag of its requests. `messages` and
    `completion` or `tool_calls` or both are the request's messages and the answer's fields, for clients that
    cannot tag. `sample` or `samples` are the ids from the answers: all answers of one conversation are one
    member. `predictor` and `call` narrow the reward to those samples of the rollout; without them it holds
    for every sample the rollout made. `reward` None excludes the member and counts `failure` (C22): an
    excluded reward is not a zero. `metrics`: other figures of the rollout, shown beside its reward; nothing
    is trained by them.
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
    metrics: Annotated[dict[MetricName, FiniteFloat], Field(max_length=MAX_METRICS)] = {}

    @model_serializer(mode="wrap")
    def _without_absent_metrics(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """As an older version sends it, where there are none."""
        found = serialize(self)
        if not self.metrics:
            found.pop("metrics", None)
        return found

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
    """A state that every reader can read: finite numbers, whole characters, bounded nesting."""
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


class StepSettings(RequestBody):
    """The settings in which one step differs from the run's own `train.` keys; None: the run's value (C60).

    The names are those of TrainConfig. `learning_rate` rises to its value over `warmup_steps` steps; after
    them `schedule` keeps it constant, or lets it fall to 0 at step `schedule_steps` (linear, cosine).
    `schedule_step` is this step's place in it, 0 is the first; None counts the run's steps.
    """

    learning_rate: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    schedule: Literal["constant", "linear", "cosine"] | None = None
    warmup_steps: int | None = Field(default=None, ge=0)
    schedule_steps: int | None = Field(default=None, ge=1)
    schedule_step: int | None = Field(default=None, ge=0)
    weight_decay: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    max_grad_norm: float | None = Field(default=None, gt=0)
    loss: Literal["grpo", "dr_grpo", "dapo", "cispo", "gspo"] | None = None
    normaliser: Literal["token", "sequence", "constant"] | None = None
    scale_rewards: bool | None = None
    clip_low: float | None = Field(default=None, gt=0)
    clip_high: float | None = Field(default=None, gt=0)
    kl_beta: float | None = Field(default=None, ge=0)
    overlong: Literal["mask", "keep", "soft"] | None = None
    overlong_tokens: int | None = Field(default=None, ge=2)
    overlong_buffer: int | None = Field(default=None, ge=1)


class TrainSettings(TypedDict, total=False):
    """The keywords of `run.train`."""

    learning_rate: float
    schedule: Literal["constant", "linear", "cosine"]
    warmup_steps: int
    schedule_steps: int
    schedule_step: int
    weight_decay: float
    max_grad_norm: float
    loss: Literal["grpo", "dr_grpo", "dapo", "cispo", "gspo"]
    normaliser: Literal["token", "sequence", "constant"]
    scale_rewards: bool
    clip_low: float
    clip_high: float
    kl_beta: float
    overlong: Literal["mask", "keep", "soft"]
    overlong_tokens: int
    overlong_buffer: int


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


class ScoredRollout(RequestBody):
    """One rollout of a validation: its example's name, and its reward, or why it has none."""

    rollout: str = Field(min_length=1, max_length=128)
    group: str = Field(default="", max_length=128)
    reward: float | None = None
    failure: str | None = None


class Validation(RequestBody):
    """`POST /slipway/validations`: a held-out score. The same compile, step and name is the same validation.

    `step`: the number of steps that the compile had taken. `version`: the policy that was scored; None: the
    served one. `rollouts`: those whose texts are kept.
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
    rollouts: Annotated[list[ScoredRollout], Field(max_length=MOST_SAMPLES)] = []


class RestoreRequest(RequestBody):
    """`POST /slipway/checkpoints/{name}/restore`: serve a kept checkpoint as a new version.

    Without `client_state` the program's place becomes the checkpoint's as well.
    """

    key: str = Field(min_length=1, max_length=128)
    client_state: ClientState = None
