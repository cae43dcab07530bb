"""The bodies that the client reads, its own copy, beside those that it sends (`request_bodies.py`).

A user's own `runtime` module beside the program hides none. Neighbours: `runtime/shared/statuses.py` has the
runtime's answers, and a test compares: an answer here has at most its keys. `wire.py` and `connection.py`
read these. Knows nothing of HTTP or of DSPy, and imports pydantic, and `base/sanitize.py` for printed text.
"""

from __future__ import annotations

from typing import Any, Literal

from launcher.base.sanitize import one_line as sanitized
from launcher.client.request_bodies import ResponseBody

# The runtime's reason for answers that were usable, in a group whose rewards are equal.
NO_VARIANCE = "no variance in its group"
# "empty": nothing of it teaches anything, so it has no version.
StepState = Literal["queued", "training", "committed", "published", "failed", "empty"]


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

    def __repr__(self) -> str:
        """Short: the counts and metrics are fields of it."""
        served = "no version" if self.version is None else f"v{self.version}"
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
    # The disk's error while it takes no new step.
    disk: str | None = None
