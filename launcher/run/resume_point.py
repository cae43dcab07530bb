"""Finds the step from which a run that ended or was killed resumes, once its leftovers are ended.

Neighbours: `launching.py` calls it once the request is checked, `run.py` runs the run again under its own id,
`resume_source.py` has its recorded settings, `durable.py` finds the steps that survived the machine. Knows
nothing of printing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from launcher.base.errors import UsageError
from launcher.records.endpoint import RESULTS
from launcher.records.records import LiveRunError, RecordStore, RunRecord
from launcher.results import durable, whole_checkpoints
from launcher.teardown import take_down
from launcher.types.machine import Machine
from runtime.shared.start_adapter_layout import START


@dataclass(frozen=True)
class ResumePoint:
    """A run to be resumed after `step`. `rewinds`: the machine's state is gone, so the durable step is
    used, or at step 0 the initial adapter."""

    record: RunRecord
    step: int
    rewinds: bool

    def describe(self) -> str:
        """For the plan's line: "resuming after step 7"."""
        gone = "the machine's state is lost"
        if self.rewinds and self.step == 0:
            return f"resuming with the adapter it started with: {gone}"
        how = f", the last durable one: {gone}" if self.rewinds else ""
        return f"resuming after step {self.step}{how}"


def prepare_resume(
    store: RecordStore,
    record: RunRecord,
    machine_of: Callable[[RunRecord], Machine],
    say: Callable[[str], None],
) -> ResumePoint:
    """The run, proven to be down, and the step after which it continues. Starts nothing.

    Waits for a guardian that is at work, and ends an unattended run. Raises UsageError for a run that lives
    and for one without a step to resume from, NotPulled if its machine is kept for results that cannot be
    brought home, TeardownUnverified.
    """
    record = _end_leftovers(store, store.load(record.id), say)
    step = machine_of(record).committed()
    if step is not None:
        return ResumePoint(record, step, rewinds=False)
    results = store.folder(record.id) / RESULTS
    step = whole_checkpoints.newest_whole_step(results / durable.FOLDER)
    if step is not None:
        return ResumePoint(record, step, rewinds=True)
    if (results / START).is_dir():
        return ResumePoint(record, 0, rewinds=True)
    command = f" -- {' '.join(record.command)}" if record.command else ""
    raise UsageError(
        f"{record.name or record.id} has nothing to resume",
        "it never committed a step, or nothing of it is left",
        f"launch{command}  # the same run from its beginning",
    )


def _end_leftovers(store: RecordStore, record: RunRecord, say: Callable[[str], None]) -> RunRecord:
    """The record of a run that is over; the leftovers of an unattended run are ended here."""
    if record.live and (record.elsewhere or record.launch_alive):
        raise LiveRunError(record)
    record = take_down.after_guardian(store, record, say)
    if not record.live:
        return record
    if record.is_attended:
        raise LiveRunError(record)
    return take_down.take_down(store, record, "resume", say)
