"""The data of one run's page, each piece a JSON value, from the files on this computer.

    run       what changes all the time: state, money, lease, processes, and a revision of the rest
    steps     figures of each step, validations, alarms, proofs
    texts     which files of texts are here, and what they tell
    settings  each setting with its source
    logs      the logs that there are
    step-7    the texts of a step (`page_rollouts.py`)
    log-NAME  a piece of a log (`page_logs.py`)
    search    texts with some words in them
    like      the rollouts that began with the same prompt, over all steps

Neighbours: `pages.py` has the runs and asks, `results/run_history.py` reads the figures. Reads files and the
record; the caller passes in the live status of runtime and relay.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from launcher.dashboard import page_logs, page_settings
from launcher.dashboard.page_rollouts import AT_ONCE, RolloutFiles
from launcher.records import lives
from launcher.records.endpoint import RESULTS
from launcher.records.records import RecordStore, RunRecord
from launcher.results import durable, run_history
from launcher.results.journals import read_lines
from launcher.results.rollout_texts import redact
from launcher.results.run_history import RunHistory, mapping, number

_PUBLICATIONS = "publications.jsonl"
_JOURNALS = (*durable.JOURNALS, "grpo.jsonl", "alarms.jsonl")
# The numbers in a version's proof; those of the model check are in two parts.
_PROVEN = (
    "version", "step", "time", "seconds", "engines", "modules", "probe_tokens", "max_error", "mean_error",
    "cached_error", "effect", "stage_seconds", "verify_seconds", "probe_seconds",
)  # fmt: skip
_MAX_TEXT_LENGTH = 400
# Of a run's empty steps, the newest.
_MOST_EMPTY = 200


class RunPageData:
    """The page's data of one run. Used from one thread at a time."""

    def __init__(self, store: RecordStore, run_id: str) -> None:
        self._store = store
        self._id = run_id
        self._folder = store.folder(run_id)
        self.rollouts = RolloutFiles(self._folder / RESULTS)
        self._history: tuple[str, RunHistory] | None = None

    def run(
        self, runtime: Mapping[str, Any] | None = None, relay: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """What changes all the time. `runtime`: the runtime's own status; `relay`: the relay's."""
        record = self._store.load(self._id)
        found = {
            "now": time.time(),
            "revision": self.revision(record),
            "texts": self._texts_revision(),
            "run": _run(record),
            "money": _cost(record),
            "lease": _lease(record, runtime),
            "standing": self._durability(record),
            "runtime": _runtime(runtime),
            "door": None if relay is None else dict(relay),
        }
        return redact(found)  # a command line may hold text that looks like a secret

    def steps(self) -> dict[str, Any]:
        """Figures, alarms, proofs."""
        record = self._store.load(self._id)
        history = self.history(record)
        return {
            "revision": self.revision(record),
            "steps": history.steps,
            "times": history.times,
            "kinds": history.kinds,
            "columns": {**history.columns, **_spent(history, record)},
            "dropped": history.dropped,
            "validations": [asdict(it) for it in history.validations],
            "alarms": redact([asdict(it) for it in history.alarms]),
            "empty": redact([asdict(it) for it in history.empty[-_MOST_EMPTY:]]),
            "empty_steps": len(history.empty),
            "proofs": redact(self._proofs(record)),
        }

    def texts(self, at_once: int | None = AT_ONCE) -> dict[str, Any]:
        """The files of texts; `at_once`: how many may be read for it. `more`: not all were read yet."""
        revision = self._texts_revision()
        found = self.rollouts.summaries(at_once)
        waiting = len(self.rollouts.stamps()) > len(found)
        return {"revision": revision, "more": waiting, "files": [it.to_dict() for it in found]}

    def history(self, record: RunRecord | None = None) -> RunHistory:
        """The run's figures, read again when a file has changed."""
        record = record or self._store.load(self._id)
        revision = self.revision(record)
        if self._history is None or self._history[0] != revision:
            read = run_history.read(self._folder / RESULTS, _machine(record))
            self._history = (revision, read)
        return self._history[1]

    def settings(self) -> list[dict[str, Any]]:
        """Name, value and source of each setting, of the run and of what trained on it."""
        record = self._store.load(self._id)
        return page_settings.settings_of(record, self._folder / RESULTS, _machine(record))

    def logs(self) -> list[dict[str, Any]]:
        """Name and size of each log."""
        return page_logs.listed(self._folder)

    def log(self, name: str, start: int | None, most: int = page_logs.PIECE_BYTES) -> dict[str, Any] | None:
        """A piece of one; see `page_logs.piece`."""
        return page_logs.piece(self._folder, name, start, most)

    def step_rollouts(self, name: str) -> dict[str, Any]:
        """The texts of one step, by the name that `steps` has of them."""
        return {"name": name, "lines": self.rollouts.lines(name)}

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to show yet."""
        record = self._store.load(self._id)
        return self.history(record).is_empty and not self.rollouts.stamps() and not self._proofs(record)

    def _proofs(self, record: RunRecord) -> list[dict[str, Any]]:
        path = run_history.longest_copy(self._folder / RESULTS, _machine(record), _PUBLICATIONS)
        return [_proof(it) for it in read_lines(path)]

    def revision(self, record: RunRecord) -> str:
        """A value that changes whenever a file behind the figures has changed."""
        digest = hashlib.sha256()
        for name in _JOURNALS:
            path = run_history.longest_copy(self._folder / RESULTS, _machine(record), name)
            try:
                it = path.stat()
                digest.update(f"{name} {it.st_mtime_ns} {it.st_size}".encode())
            except OSError:
                continue
        return digest.hexdigest()[:16]

    def _texts_revision(self) -> str:
        return hashlib.sha256(repr(sorted(self.rollouts.stamps().items())).encode()).hexdigest()[:16]

    def _durability(self, record: RunRecord) -> dict[str, Any]:
        machine = Path(record.machine.get("state_dir") or self._folder / "machine")
        return durable.durability_status(machine, self._folder / RESULTS).to_dict()


def _machine(record: RunRecord) -> Path | None:
    """Its machine's folder, where that is on this computer and still written to."""
    folder = record.machine.get("state_dir") if record.live else None
    return Path(folder) if folder and record.machine.get("kind") == "local" else None


# ------------------------------------------------------------------ figures


def _spent(history: RunHistory, record: RunRecord) -> dict[str, list[float | None]]:
    """US dollars by the end of each step; nothing where nothing is paid."""
    if not any(life.price_per_hour for life in record.lives):
        return {}
    spent = [
        None
        if it is None
        else sum(replace(life, ended=min(it, life.ended or it)).cost(it) for life in record.lives)
        for it in history.times
    ]
    return {"cost": spent}


def _proof(line: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {name: number(line.get(name)) for name in _PROVEN}
    adapter = mapping(line.get("adapter"))
    if found["max_error"] is None and adapter:  # of the model itself, before the first step
        found |= {"max_error": number(adapter.get("largest")), "mean_error": number(adapter.get("mean"))}
    for name in ("outcome", "name", "sha256", "reason", "error", "detail"):
        found[name] = None if line.get(name) is None else str(line[name])[:_MAX_TEXT_LENGTH]
    return found


# ------------------------------------------------------------------ the record


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
        # On the user's own cluster, whose price is not known here.
        "unpriced": bool(plan.get("rented")) and not plan.get("dearest_per_hour"),
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
