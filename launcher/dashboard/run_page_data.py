"""The data of a run's page: its summary, its steps, and one step's rollouts, from the files on this computer.

Neighbours: `page_steps.py` and `page_rollouts.py` read, `proxy/page_routes.py` serves it while the run lives,
`page_folder.py` keeps it as a folder. Each answer is a JSON value. Reads files and the record; the caller
passes in the live status of runtime and relay.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.dashboard import page_steps
from launcher.dashboard.page_rollouts import AT_ONCE, RolloutFiles
from launcher.records import lives
from launcher.records.endpoint import RESULTS
from launcher.records.records import RecordStore, RunRecord
from launcher.results import durable, report_data, rollout_texts

_JOURNALS = (*durable.JOURNALS, "grpo.jsonl")


class RunPageData:
    """The page's data of one run. Used from one thread at a time."""

    def __init__(self, store: RecordStore, run_id: str) -> None:
        self._store = store
        self._id = run_id
        self._folder = store.folder(run_id)
        self._rollouts = RolloutFiles(self._folder / RESULTS)
        self._read: tuple[str, dict[str, Any]] | None = None

    def summary(
        self, runtime: Mapping[str, Any] | None = None, relay: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Everything but the steps. `runtime`: the runtime's own status; `relay`: the relay's."""
        record = self._store.load(self._id)
        now = time.time()
        summary = {
            "now": now,
            "revision": self._revision(record),
            "run": _run(record),
            "money": _cost(record),
            "lease": _lease(record, runtime),
            "standing": self._durability(record),
            "runtime": _runtime(runtime),
            "door": None if relay is None else dict(relay),
        }
        return rollout_texts.redact(summary)  # a command line may hold text that looks like a secret

    def steps(self, at_once: int | None = AT_ONCE) -> dict[str, Any]:
        """Its steps, validations, proofs; `at_once`: how many files of texts may be looked through for it."""
        record = self._store.load(self._id)
        before, revision = len(self._rollouts.summaries(0)), self._revision(record)
        digests = self._rollouts.summaries(at_once)
        if self._read is None or self._read[0] != revision or len(digests) != before:
            found = page_steps.of_run(self._folder / RESULTS, _machine(record))
            for row in found["steps"]:
                digest = digests.get(row["step"])
                row["said"] = 0 if digest is None else digest.lines
                row["lag_mean"] = None if digest is None else digest.lag_mean
                row["lag_most"] = None if digest is None else digest.lag_most
            self._read = revision, found | {"proofs": rollout_texts.redact(found["proofs"])}
        waiting = len(self._rollouts.stamps()) > len(digests)
        return {"revision": revision, "more": waiting, **self._read[1]}

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to show yet."""
        found = self.steps(0)
        return not (found["steps"] or found["validations"] or found["proofs"])

    def step_rollouts(self, step: int) -> dict[str, Any]:
        """The rollouts of one step, as texts."""
        return {"step": step, "lines": self._rollouts.of_step(step)}

    def steps_with_texts(self) -> list[int]:
        """The steps whose texts are at home."""
        return sorted(self._rollouts.stamps())

    def _revision(self, record: RunRecord) -> str:
        """A value that changes whenever a file behind the steps has changed."""
        digest = hashlib.sha256(repr(sorted(self._rollouts.stamps().items())).encode())
        for name in _JOURNALS:
            path = report_data.longest_copy(self._folder / RESULTS, _machine(record), name)
            try:
                it = path.stat()
                digest.update(f"{name} {it.st_mtime_ns} {it.st_size}".encode())
            except OSError:
                continue
        return digest.hexdigest()[:16]

    def _durability(self, record: RunRecord) -> dict[str, Any]:
        machine = Path(record.machine.get("state_dir") or self._folder / "machine")
        return durable.durability_status(machine, self._folder / RESULTS).to_dict()


def _machine(record: RunRecord) -> Path | None:
    """Its machine's folder, where that is on this computer and still written to."""
    folder = record.machine.get("state_dir") if record.live else None
    return Path(folder) if folder and record.machine.get("kind") == "local" else None


def _run(record: RunRecord) -> dict[str, Any]:
    plan, cluster_status = record.details.get("plan") or {}, record.machine.get("standing") or {}
    where = [cluster_status.get("where") or plan.get("where"), cluster_status.get("instance_type")]
    return {
        "id": record.id,
        "name": record.name,
        "label": record.name or record.id,
        "model": str(plan.get("model") or ""),
        "where": " · ".join(str(it) for it in where if it),
        "state": record.state,
        "live": record.live and record.is_attended,
        "down": record.proof,
        "command": " ".join(record.command),
        "begun": record.life.begun,
        "ended": record.ended,
        "seconds": lives.seconds(record.lives, record.now()),
        "lives": len(record.lives),
        "exit_code": record.exit_code,
        "reason": record.reason,
        "why": record.why,
        "unpulled": record.unpulled,
        "url": record.url,
    }


def _cost(record: RunRecord) -> dict[str, Any]:
    plan, cluster_status = record.details.get("plan") or {}, record.machine.get("standing") or {}
    return {
        "per_hour": cluster_status.get("price_per_hour", plan.get("price_per_hour")),
        "spent": lives.cost(record.lives, record.now()),
        "at_most": plan.get("cost_at_most"),
        "budget": plan.get("budget"),
    }


def _lease(record: RunRecord, runtime: Mapping[str, Any] | None) -> dict[str, Any]:
    plan = record.details.get("plan") or {}
    deadline = plan.get("deadline_seconds")
    return {
        "seconds": plan.get("lease_seconds"),
        "left_seconds": (runtime or {}).get("lease_left_seconds"),
        "deadline_seconds": deadline,
        "deadline_left_seconds": None if deadline is None else record.life.begun + deadline - record.now(),
    }


def _runtime(status: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The part of the runtime's status that the page shows."""
    if status is None:
        return None
    children = [
        {name: child.get(name) for name in ("name", "state", "restarts", "detail")}
        for child in status.get("children", [])
    ]
    shown = {name: status.get(name) for name in ("phase", "model", "step", "version", "steps_queued")}
    return {**shown, "children": children}
