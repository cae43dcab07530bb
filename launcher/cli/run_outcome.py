"""A run as people read it in a list: its end in plain words, its duration, its row in the table.

Neighbours: `run_verbs.py` prints, `records/records.py` has the record, `results/run_history.py` the reward.
Asks no runtime and no provider.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from launcher.base.units import format_duration, format_money
from launcher.console.output import phase_name
from launcher.records import lives
from launcher.records.endpoint import RESULTS
from launcher.records.lease import is_limit
from launcher.records.records import ENDS, RecordStore, RunRecord
from launcher.results import durable, run_history
from launcher.types.durability import DurabilityStatus

HEADING = ["NAME", "ID", "STATE", "DOWN", "MODEL", "STEPS", "REWARD", "DURATION", "COST"]
_SIGNALS = {
    "interrupted by SIGINT": "stopped by Ctrl-C",
    "interrupted by SIGTERM": "stopped by SIGTERM",
    "interrupted by SIGHUP": "stopped: its terminal was closed",
}
_ENDED_BY = {
    "guardian": "ended by the guardian",
    "down": "ended by launch down",
    "gc": "ended by launch gc",
    "resume": "ended by launch --resume",
}


@dataclass(frozen=True)
class RunProgress:
    """How far a run has come, by the files on this computer; None before the first step."""

    durability: DurabilityStatus
    steps: int | None
    reward: float | None


def progress(record: RunRecord, store: RecordStore) -> RunProgress:
    """Read it."""
    results = store.folder(record.id) / RESULTS
    machine = Path(record.machine.get("state_dir", store.folder(record.id) / "machine"))
    durability = durable.durability_status(machine, results)
    measured, reward = run_history.newest_step_and_reward(results, machine)
    known = [step for step in (durability.committed, durability.durable, measured) if step is not None]
    return RunProgress(durability, max(known, default=None), reward)


def row(record: RunRecord, store: RecordStore) -> list[str]:
    """Its cells under `HEADING`."""
    so_far = progress(record, store)
    return [
        record.name or "-",
        record.id,
        state(record),
        down(record),
        model(record) or "-",
        "-" if so_far.steps is None else str(so_far.steps),
        "-" if so_far.reward is None else f"{so_far.reward:.3g}",
        format_duration(seconds(record)),
        format_money(cost(record)),
    ]


def state(record: RunRecord) -> str:
    """How it ended, until then its phase; and where it is, or that nobody attends it, while anything may be
    left of it."""
    now = outcome(record) or phase_name(record.state)
    if record.elsewhere:
        return f"{now}, on {record.place.host if record.place else '?'}"
    if record.live and not record.is_attended:
        return f"{now}, left alone: launch down {record.name or record.id}"
    return now


def outcome(record: RunRecord) -> str | None:
    """Its end in plain words: "failed with code 3, ended by launch gc"; None while it is live."""
    if record.state not in ENDS:
        return None
    words = [word for word in (_program_end(record), _ENDED_BY.get(record.ended_by or "")) if word]
    if record.unpulled is not None:
        words.append("newest results not copied")
    return ", ".join(words) or "ended"


def down(record: RunRecord) -> str:
    """Whether it is proven that nothing of it is left."""
    if record.state not in ENDS:
        return "-"
    return "NOT VERIFIED" if record.live else "verified"


def model(record: RunRecord) -> str | None:
    """The model it was started with; of a folder its name."""
    found = (record.details.get("plan") or {}).get("model")
    return None if found is None else Path(found).name if Path(found).is_absolute() else str(found)


def seconds(record: RunRecord) -> float:
    """The duration of all its lives; it stands still once the run has ended, proven or not."""
    ended = record.state in ENDS and record.ended is not None
    return lives.seconds(record.lives, record.ended if ended and record.ended else record.now())


def cost(record: RunRecord) -> float:
    """US dollars of all its lives; a machine that is not proven to be down goes on costing."""
    return lives.cost(record.lives, record.now())


def _program_end(record: RunRecord) -> str | None:
    """The end of its program, or the reason that it came to none."""
    reason = record.reason or ""
    if record.exit_code is not None:
        return "succeeded" if record.exit_code == 0 else f"failed with code {record.exit_code}"
    if reason in _SIGNALS:
        return _SIGNALS[reason]
    if is_limit(reason):
        return f"stopped: {reason}"
    # Of a run that another process ended, the reason is that its launcher was gone.
    return "failed" if reason and record.ended_by not in _ENDED_BY else None
