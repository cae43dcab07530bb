"""The HTTP bodies that are sent to the runtime, the headers, and the common part of its answers.

Neighbours: client and CLI send them; `statuses.py` has the answers, `runtime_config.py` the configuration,
`train_config.py` the settings of a step. `python -m tests.generate` makes the client's copy of this file.
Knows nothing of torch, vLLM, files or processes: pydantic only, so both halves can import it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    SerializerFunctionWrapHandler,
    create_model,
    model_serializer,
    model_validator,
)

from runtime.shared.train_config import TrainConfig, per_step_settings

SCHEMA = 1

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
# "follows": the sender will report whether the answer reached its client (`POST /slipway/receipts`).
RECEIPT_HEADER = "x-slipway-receipt"
RECEIPT_FOLLOWS = "follows"
# So many receipts at a time.
MOST_RECEIPTS = 4096
# On every answer that sampled: the policy version that produced it.
VERSION_HEADER = "x-slipway-policy-version"

# A request has at most this, unpacked: relay and gateway refuse more.
BODY_BYTES = 32 * 2**20

CLIENT_STATE_MAX_BYTES = 64 * 1024
STATE_DEEPEST = 64
# A supervised step has at most so many.
MOST_EXAMPLES = 4096


class Body(BaseModel):
    """A request body: an unknown key is an error, not a silent no-op."""

    # A reward that is no number must arrive as one: as null it would be a missing reward.
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")


class Answer(BaseModel):
    """A response body: keys are only ever added, so readers ignore unknown ones."""

    model_config = ConfigDict(extra="ignore", frozen=True)


# ------------------------------------------------------------------ steps


SampleId = Annotated[str, Field(min_length=1, max_length=256)]
# Of one member: the turns of one conversation.
MOST_SAMPLES = 4096
MetricName = Annotated[str, Field(min_length=1, max_length=64)]
MAX_METRICS = 32


class Member(Body):
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


class Group(Body):
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


def _optional_settings() -> dict[str, Any]:
    """Every setting that a step may have its own value of, as TrainConfig bounds it; None: not given."""
    found = dict[str, Any]()
    for name in per_step_settings():
        field = TrainConfig.model_fields[name]
        annotation: Any = field.annotation
        found[name] = (Annotated[(annotation | None, *field.metadata)], None)
        if name == "schedule_steps":
            # Beside it, as ever: a client's key of a step is made from its settings in their order.
            found["schedule_step"] = (int | None, None)
    return found


# For a type checker, a step's settings have the names and types of the run's.
if TYPE_CHECKING:
    _OptionalSettings = TrainConfig
else:
    _OptionalSettings = create_model("_OptionalSettings", __base__=Body, **_optional_settings())


class StepSettings(_OptionalSettings):
    """The settings in which one step differs from the run's own `train.` keys; None: the run's value (C60).

    The names are those of TrainConfig. `learning_rate` rises to its value over `warmup_steps` steps; after
    them `schedule` keeps it constant, or lets it fall to 0 at step `schedule_steps` (linear, cosine).
    `schedule_step` is this step's place in it, 0 is the first; None counts the run's steps.
    """

    schedule_step: int | None = Field(default=None, ge=0)


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


class ScoredRollout(Body):
    """One rollout of a validation: its example's name, and its reward, or why it has none."""

    rollout: str = Field(min_length=1, max_length=128)
    group: str = Field(default="", max_length=128)
    reward: float | None = None
    failure: str | None = None


class Validation(Body):
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


class RestoreRequest(Body):
    """`POST /slipway/checkpoints/{name}/restore`: serve a kept checkpoint as a new version.

    Without `client_state` the program's place becomes the checkpoint's as well.
    """

    key: str = Field(min_length=1, max_length=128)
    client_state: ClientState = None
