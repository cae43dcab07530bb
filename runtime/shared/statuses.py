"""The runtime's answers: its own state, its children's, a step's, a checkpoint's.

Neighbours: `schema.py` has the requests. Pydantic only, so both halves can import it.
"""

from __future__ import annotations

from typing import Any, Literal

from runtime.shared.schema import Answer

# The trainer's detail begins with it while its disk takes no checkpoint.
NOT_COMMITTED = "not committed yet"

# "empty": nothing of it teaches anything, so it has no version.
StepState = Literal["queued", "training", "committed", "published", "failed", "empty"]
# The states in which a step ends.
ENDED: tuple[StepState, ...] = ("published", "failed", "empty")


class StepCounts(Answer):
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
    # Samples that go on from an earlier turn id for id, and are trained in one sequence with it.
    turns_joined: int = 0
    # How often a rollout's next sample did not go on from the last, and began a sequence of its own; why.
    sealed: int = 0
    sealed_by: dict[str, int] = {}
    groups_without_variance: int = 0
    # Answers without a receipt: no samples, so not among `samples` either.
    unreceived: int = 0
    dropped: dict[str, int] = {}


class StepStatus(Answer):
    """`GET /slipway/steps/{id}?wait=30`: answers once the step has ended, or when the wait ends.

    `id`: 0 for an empty step that was never queued. `error`: the reason of a failed or empty one.
    """

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
    empty_steps: int = 0  # taken no number, as nothing of them taught anything
    steps_queued: int = 0
    children: list[ChildState] = []
    lease_left_seconds: float | None = None
    client_state: dict[str, Any] | None = None
    last_metrics: dict[str, float] = {}
    settings: dict[str, Any] = {}  # the run's own `train.` settings that a step may change
    max_staleness: int | None = None  # a sample that is more steps old is not trained
    places: int | None = None  # how many sequences all engines sample at a time
    samples: int = 0
    prefix_cache_hits: float | None = None  # of the tokens of all prompts so far, the share that was cached
    admission: dict[str, Any] | None = None  # as admission.json: whether engine and trainer agree
    detail: str | None = None
    warnings: list[str] = []
    disk: str | None = None  # the disk's error while it takes no new step
