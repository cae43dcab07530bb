"""Ends an unattended run: downloads its results, takes everything down, records the proof.

Neighbours: `launch down`, `launch gc` and `launch --resume` end runs by this; `end_run.py` has the order, as
for `guardian.py` and `ending.py`. A machine whose disk goes with it is not ended while its results cannot be
brought home: it is kept until its own lease ends it, deadline or budget is reached, or the user gives them up
with `--give-up-results`. Knows nothing of the terminal.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from launcher.backends import machine_from_record
from launcher.backends.machine_from_record import NoMachine, from_record
from launcher.base import process_inspection, processes
from launcher.base.errors import LaunchError, NotPulled, PreflightError, TeardownUnverified, described
from launcher.base.processes import ProcessId
from launcher.base.units import format_money
from launcher.records import lives, teardown_lock
from launcher.records.endpoint import RESULTS, delete_token
from launcher.records.lease import Limits
from launcher.records.records import RecordStore, RunRecord, end_fields
from launcher.records.teardown_lock import LockHandle, LockOwner
from launcher.results.background_copy import pull_with_retries
from launcher.teardown import abandon_results, self_termination
from launcher.teardown.end_run import COPYING_RESULTS, end_run
from launcher.types.machine import (
    CLOSE_WANDB_SECONDS,
    Machine,
    Progress,
    Proof,
    PullReport,
    Stopped,
    never_stopped,
    no_progress,
)

# Results that do not come at once are tried again for so long, while the user of `launch down` waits. The
# copy of results that were given up may take as long.
TRIES_SECONDS = 60.0
_POLL_SECONDS = 1.0
# A guardian that is stopped does nothing any more.
_STUCK_SECONDS = teardown_lock.STUCK_SECONDS
# A guardian that has not held the lock for so long is idle, whatever state the record has.
_IDLE_SECONDS = 5.0

Note = Callable[[str], None]


@dataclass(frozen=True)
class _PullOutcome:
    """`unpulled`: why the newest results are not on this computer, None when they are. `gone`: the
    provider's list had no machine of the run, before anything was ended."""

    unpulled: str | None
    gone: bool = False


def pull(
    store: RecordStore, record: RunRecord, progress: Progress = no_progress, stopped: Stopped = never_stopped
) -> PullReport:
    """Download the run's results, or until `stopped`. Raises NotPulled."""
    machine = from_record(record)
    if isinstance(machine, NoMachine):
        raise NotPulled(
            f"{record.id} has nothing to copy", "it ended before it had a machine", "launch status"
        )
    return cast("Machine", machine).pull(store.folder(record.id) / RESULTS, progress, stopped)


class ResultsWait:
    """The wait for a launch that keeps a run's machine for its results: for `seconds`; then the exit code
    is 8, and the launch goes on."""

    def __init__(self, store: RecordStore, run_id: str, seconds: float) -> None:
        self._store = store
        self._run_id = run_id
        self._seconds = seconds
        self._since: float | None = None

    def check(self, other: LockOwner | None) -> None:
        """Called repeatedly with the current owner of the teardown. Raises NotPulled."""
        now = time.monotonic()
        if other is None or other.doing != teardown_lock.WAITING_FOR_RESULTS:
            self._since = None
        elif self._since is None:
            self._since = now
        elif now - self._since > self._seconds:
            raise _kept_by_other_error(other, self._store.load(self._run_id))


def after_guardian(store: RecordStore, record: RunRecord, note: Note) -> RunRecord:
    """The record when no guardian is at work on the run any more, or it rests between two tries: two must not
    take one machine down at once.

    Raises TeardownUnverified for one that stands still.
    """
    guardian = record.guardian
    if record.elsewhere or not record.live or record.launch_alive or guardian is None or not guardian.alive():
        return record
    note(f"{record.name or record.id}: its guardian is still taking it down")
    still = idle = 0.0
    while not processes.wait_for_end(guardian, _POLL_SECONDS):
        record, is_stopped = store.load(record.id), process_inspection.is_stopped(guardian)
        rests = not is_stopped and teardown_lock.owner(store.folder(record.id)) is None
        idle = idle + _POLL_SECONDS if rests else 0.0
        if rests and (record.state == "unverified" or idle > _IDLE_SECONDS):
            break
        still = still + _POLL_SECONDS if is_stopped else 0.0
        if still > _STUCK_SECONDS:
            raise _is_stuck(record, guardian)
    return store.load(record.id)


def take_down(
    store: RecordStore,
    record: RunRecord,
    ended_by: str,
    note: Note = no_progress,
    progress: Progress = no_progress,
    *,
    give_up: bool = False,
) -> RunRecord:
    """End an unattended run, or return it ended by another process. `give_up`: the user does not wait for its
    results. The record's `unpulled` is the reason why the newest results are not on this computer. `progress`
    gets the copy's progress.

    Raises NotPulled when the machine is kept for the results, and TeardownUnverified; the record then stays
    live. It also does if the run's processes are on another computer or container: only a rented machine is
    ended from here.
    """
    if record.elsewhere and not record.rented:
        raise _unreachable(record)
    keeping = ResultsWait(store, record.id, TRIES_SECONDS)
    with teardown_lock.exclusive(store.folder(record.id), ended_by, note, look=keeping.check) as lock:
        expected, record = record, store.load(record.id)
        if _ended_by_another(expected, record):
            return record
        return end_run(lock, _UnattendedEnd(store, record, ended_by, note, progress, give_up))


class _UnattendedEnd:
    """The `EndPolicy` of a run that nobody attends: an error that the user can mend is raised."""

    def __init__(
        self,
        store: RecordStore,
        record: RunRecord,
        ended_by: str,
        note: Note,
        progress: Progress,
        give_up: bool,
    ) -> None:
        self._store = store
        self._record = record
        self._ended_by = ended_by
        self._note = note
        self._progress = progress
        self._give_up = give_up
        self._outcome = _PullOutcome(None)
        # Before anything here is heard of by its machine.
        self._latest_end = self_termination.latest_end(record)

    def bring_home(self, lock: LockHandle) -> None:
        """Raises NotPulled when the machine is kept."""
        progress = lock.reporting(COPYING_RESULTS, self._progress)
        self._outcome = _bring_home(self._store, self._record, self._note, progress, self._give_up)

    def ended_by_another(self) -> RunRecord | None:
        """The record, if it can be read and says so. Raises TeardownUnverified if the run was resumed."""
        try:
            now = self._store.load(self._record.id)
        except Exception as error:  # noqa: BLE001 - after any error the machine must end
            self._note(described(error))
            return None
        return now if _ended_by_another(self._record, now) else None

    def take_down(self) -> Proof:
        """Its launch is gone, and with it all of its endpoint but the token."""
        try:
            delete_token(self._store.folder(self._record.id))
        except Exception as error:  # noqa: BLE001 - after any error the machine must end
            label = self._record.name or self._record.id
            self._note(f"{label}: its token is still in its folder: {described(error)}")
        return machine_from_record.end_machine(from_record(self._record), self._note)

    def write_record(self, proof: Proof) -> RunRecord:
        """The record with its end. Raises TeardownUnverified, and PreflightError if it cannot be written."""
        now, latest = self._record.now(), self._latest_end
        ended = now if latest is None or not self._outcome.gone else min(latest, now)
        fields = end_fields(proof, self._ended_by, ended, self._outcome.unpulled)
        return _write_final_record(self._store, self._record, proof, fields)


def close_unseen(store: RecordStore, record: RunRecord) -> RunRecord:
    """Close the record of a run on another computer or container that the user declares gone: nothing here
    can prove it. Raises TeardownUnverified if there is a sign of its life."""
    if not record.silent:
        raise _unreachable(record)
    where = record.place.host if record.place else "?"
    proof = Proof(True, f"its processes cannot be seen from here; you said that {where} is gone")
    delete_token(store.folder(record.id))
    return store.update(record.id, **end_fields(proof, "down", time.time(), record.unpulled))


def limit_reached(record: RunRecord, now: float) -> str | None:
    """The limit that the run is past, in words: its newest life's time, all its lives' money. No machine
    is kept beyond a limit."""
    plan, life = record.details.get("plan") or {}, record.life
    until = (plan.get("deadline_seconds"), plan.get("budget"), life.price_per_hour)
    limits = Limits(life.begun, *until, spent=lives.cost(record.earlier_lives, now))
    return limits.reached(now)


def _bring_home(
    store: RecordStore, record: RunRecord, note: Note, progress: Progress, give_up: bool
) -> _PullOutcome:
    """Raises NotPulled when the machine is kept."""
    given_up = (lambda: True) if give_up else abandon_results.was_requested(store, record.id)
    if record.logs_to_wandb and not give_up:
        close_wandb(record, note)
    try:
        report = pull(store, record, progress, abandon_results.after_grace(TRIES_SECONDS, given_up))
        return _missing(record, report, note)
    except Exception as error:  # noqa: BLE001 - after any error the results are not at home
        why = described(error)
    machine = from_record(record)
    if not record.may_have_results:
        note(why)
        return _PullOutcome(None)
    if isinstance(machine, NoMachine) or not cast("Machine", machine).ephemeral:
        return _PullOutcome(why)
    reached = limit_reached(record, record.now())
    if not (reached or given_up()):
        note(f"{why}; trying for a minute")
        results = store.folder(record.id) / RESULTS
        tries = (cast("Machine", machine), results, TRIES_SECONDS, given_up, progress)
        if (report := pull_with_retries(*tries)) is not None:
            return _missing(record, report, note)
        if not given_up():
            raise _kept_error(record, why)
    note(f"its newest results are lost with it: {reached or 'the user gave them up'} ({why})")
    return _PullOutcome(why)


def close_wandb(record: RunRecord, note: Note, seconds: float = CLOSE_WANDB_SECONDS) -> None:
    """Before the last copy: the end of its Weights & Biases run, which has so long."""
    try:
        machine = from_record(record)
        if not isinstance(machine, NoMachine):
            cast("Machine", machine).close_wandb(seconds)
    except Exception as error:  # noqa: BLE001 - after any error the next step must be taken
        note(described(error))


def _missing(record: RunRecord, report: PullReport, note: Note) -> _PullOutcome:
    """Report the missing results; returns why the newest will never come, if there may have been some."""
    for missing in report.missing:
        note(f"not copied: {missing}")
    return _PullOutcome(report.lost if record.may_have_results else None, gone=report.lost is not None)


def _ended_by_another(expected: RunRecord, now: RunRecord) -> bool:
    """Whether the run is over. Raises TeardownUnverified if it is in a next life: that is not ours."""
    if now.live and now.launch != expected.launch:
        label = now.name or now.id
        why = "another process ended it meanwhile, and it was resumed"
        raise TeardownUnverified(f"{label} is live again", why, f"launch down {label}")
    return not now.live


def _unreachable(record: RunRecord) -> TeardownUnverified:
    label = record.name or record.id
    there = "  # typed there"
    if record.silent:
        there = " --elsewhere  # if that computer or container no longer exists"
    return TeardownUnverified(
        f"{label} cannot be ended from here",
        f"its processes are on {record.location}",
        f"launch down {label}{there}",
    )


def _kept_error(record: RunRecord, why: str) -> NotPulled:
    label, price = record.name or record.id, record.life.price_per_hour
    so_far = lives.cost([record.life], record.now())
    cost = f" at {format_money(price)}/h, {format_money(so_far)} so far" if price else ""
    return NotPulled(
        f"{label} is kept: its newest results could not be copied",
        f"{why}; its machine keeps running{cost}, until its own lease is over",
        f"launch down {label} --give-up-results  # ends it without them",
    )


def _kept_by_other_error(other: LockOwner, record: RunRecord) -> NotPulled:
    label = record.name or record.id
    return NotPulled(
        f"{label} is kept: its newest results could not be copied",
        f"{record.unpulled or 'copying fails'}; {other.who} (pid {other.process.pid}) keeps trying while "
        "lease, deadline and budget allow, then ends it without them",
        f"launch down {label} --give-up-results  # ends it now, without them",
    )


def _write_final_record(
    store: RecordStore, record: RunRecord, proof: Proof, fields: dict[str, Any]
) -> RunRecord:
    label = record.name or record.id
    unwritten: Exception | None = None
    try:
        record = store.update(record.id, **fields)
    except Exception as error:  # noqa: BLE001 - the machine's proof is reported first
        unwritten = error
    if not proof.verified:
        raise TeardownUnverified(
            f"could not verify that {label} is down", proof.detail, proof.hint or f"launch down {label}"
        )
    if unwritten is not None:
        what = f"{label} is down, but its record cannot be written"
        why = described(unwritten)
        raise PreflightError(what, why, f"launch down {label}") from unwritten
    return record


def _is_stuck(record: RunRecord, guardian: ProcessId) -> LaunchError:
    return TeardownUnverified(
        f"could not verify that {record.name or record.id} is down",
        f"its guardian (pid {guardian.pid}) is stopped",
        f"kill -CONT {guardian.pid}",
    )
