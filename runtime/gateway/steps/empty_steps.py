"""Empty steps: nothing of them teaches anything, so they take no number and no version (C69).

    empty_steps.jsonl    {"time", "key", "digest", "after": 6, "step": null, "error", "counts", "metrics",
                          "client_state"}

`after`: the newest step when it was sent; `step`: its number, if it became empty while it waited its turn. A
key that is here has its answer for good, also after a restart. Neighbours: queue.py asks when a step is
sent, handover.py when its turn comes; shared/learnable.py has the rule. Knows nothing of HTTP.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from runtime.gateway.http.step_errors import KeyReusedError
from runtime.gateway.steps.batch_building import build
from runtime.gateway.steps.selection import Selection, Source
from runtime.shared import failpoints, json_files
from runtime.shared.batch import Batch
from runtime.shared.learnable import Usable, learnable
from runtime.shared.metrics import read_lines
from runtime.shared.rewards import reward_metrics
from runtime.shared.statuses import StepCounts, StepStatus
from runtime.shared.train_config import ResolvedTrainConfig

log = logging.getLogger(__name__)

FILE = "empty_steps.jsonl"


@dataclass(frozen=True)
class EmptyStep:
    """The counts of an empty step and the metrics of its rewards; `reasons`: by the ids of its samples."""

    counts: StepCounts
    metrics: dict[str, float] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of_selection(cls, selection: Selection, store: Source, settings: ResolvedTrainConfig) -> Self | None:
        """None as soon as one group has something to learn from: mostly the first one's tokens are read."""
        for part in _groups(selection):
            if learnable(build(part, store, {}), settings).sequences:
                return None
        batch = build(selection, store, {})
        return cls.of_batch(batch, learnable(batch, settings), selection)

    @classmethod
    def of_batch(cls, batch: Batch, found: Usable, selection: Selection) -> Self | None:
        """None if there is something to learn from. The batch is the selection's."""
        if found.sequences:
            return None
        counts = found.counted(batch.meta["counts"], batch, tokens=0)
        reasons = selection.why_untrained(found)
        return cls(StepCounts.model_validate(counts), reward_metrics(batch), reasons)

    @property
    def why(self) -> str:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self.counts.dropped.items()))
        return f"nothing of this step can be learned: {reasons}"


class EmptySteps:
    """All empty steps of the run. The gateway's event loop is its only user."""

    def __init__(self, state_dir: Path, newest_step: int) -> None:
        """`newest_step`: steps after it were lost with a machine, and so were the empty ones after it."""
        self._path = state_dir / FILE
        found = [line for line in read_lines(self._path) if line["after"] <= newest_step]
        if self._path.exists():
            json_files.replace_lines(self._path, found)
        self._by_key: dict[str, dict[str, Any]] = {}
        # By `after`, the newest that carries its program's state; of the others it is on the disk alone.
        self._newest: dict[int, dict[str, Any]] = {}
        for line in found:
            self._remember(line)

    def __len__(self) -> int:
        return len(self._by_key)

    def find(self, key: str, digest: str) -> StepStatus | None:
        """The answer to an empty step that was sent before. Raises KeyReusedError."""
        line = self._by_key.get(key)
        if line is not None and line["digest"] != digest:
            raise KeyReusedError(f"key {key!r} belongs to an empty step, which had a different body")
        return None if line is None else _status(line)

    def newest_after(self, committed: int, oldest_open: int | None) -> dict[str, Any] | None:
        """The newest with a `client_state`, if no step was committed since and those before it have ended."""
        self._newest = {after: line for after, line in self._newest.items() if after >= committed}
        ended = [after for after in self._newest if oldest_open is None or oldest_open > after]
        return self._newest[max(ended)] if ended else None

    def _remember(self, line: dict[str, Any]) -> None:
        self._by_key[line["key"]] = line | {"client_state": None}
        if line["client_state"] is not None:
            self._newest[line["after"]] = line

    def add(
        self,
        key: str,
        digest: str,
        empty: EmptyStep,
        after: int,
        client_state: dict[str, Any] | None,
        step: int | None = None,
    ) -> StepStatus:
        """Record one, unless it is here; its answer. Raises OSError."""
        if (known := self.find(key, digest)) is not None:
            return known
        log.info("a step is empty: %s", empty.why)
        line = {
            "time": round(time.time(), 3), "key": key, "digest": digest, "after": after, "step": step,
            "error": empty.why, "counts": empty.counts.model_dump(),
            "metrics": {"updated": 0.0, "trained_tokens": 0.0, **empty.metrics}, "client_state": client_state,
        }  # fmt: skip
        json_files.append_line(self._path, line, durable=True)
        self._remember(line)
        failpoints.failpoint("gateway.empty")
        return _status(line)

    def between(self, committed: int, step: int) -> dict[str, int]:
        """The number of empty steps, and of their samples, after the newest `committed` step and before
        `step`."""
        lines = [it for it in self._by_key.values() if committed <= it["after"] < step]
        return {"steps": len(lines), "samples": sum(it["counts"]["samples"] for it in lines)}


def _status(line: dict[str, Any]) -> StepStatus:
    return StepStatus(
        id=line["step"] or 0, key=line["key"], state="empty", error=line["error"],
        counts=StepCounts.model_validate(line["counts"]), metrics=line["metrics"],
    )  # fmt: skip


def _groups(selection: Selection) -> Iterator[Selection]:
    """The selection of each group that has a sequence."""
    of_group: defaultdict[int, list[int]] = defaultdict(list)
    for place, (_, member) in enumerate(selection.sequences):
        of_group[selection.members[member][0]].append(place)
    for places in of_group.values():
        sequences = [selection.sequences[place] for place in places]
        members = sorted({member for _, member in sequences})
        renumbered = {member: place for place, member in enumerate(members)}
        yield replace(
            selection,
            members=[selection.members[member] for member in members],
            sequences=[(turns, renumbered[member]) for turns, member in sequences],
        )
