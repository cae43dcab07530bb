"""The detached process that takes a run's machine down when its launcher is gone, for any reason.

    python -m launcher.teardown.guardian RUNS/<id>/record.json

`launch` holds the other end of a pipe on its standard input. The line "released" ends it. The end of the pipe
without that line means that the launcher is dead; the system reports it within milliseconds.
Neighbours: `run.py` starts it before the machine is armed; `backends/machine_from_record.py` finds the
machine again. It imports little, so that it is up before anything else. Then it imports at once everything
that ending its machine needs, because later the files may be another version's. For a rented machine it also
starts a standby process that can ask the provider. Knows nothing of the terminal.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from launcher.backends import machine_from_record
from launcher.backends.machine_from_record import NoMachine, StandbyHelper, from_record
from launcher.base import clock, descriptor_polling, process_inspection, processes
from launcher.base.errors import JobFailed, PreflightError, described
from launcher.base.module_command import module_command
from launcher.base.processes import ProcessId
from launcher.records import teardown_lock
from launcher.records.endpoint import RESULTS, delete_token
from launcher.records.records import RUN_VARIABLE, RecordStore, RunRecord, end_fields
from launcher.records.teardown_lock import LockHandle
from launcher.results import trackio_process
from launcher.teardown import abandon_results, last_copy, self_termination, take_down
from launcher.teardown.end_run import end_run
from launcher.types.machine import Proof, Stopped, no_progress

if TYPE_CHECKING:
    from launcher.types.machine import Machine

LOG = "guardian.log"
_RELEASE = b"released\n"
_READY = b"ready\n"
_START_SECONDS = 20.0
# The user's command has its own minder, which sees the same end; this time is for processes that the minder
# could not end.
_COMMAND_SECONDS = 5.0
# An unproven end is tried again after these pauses, each twice the one before: a login may have ended, and
# the user may log in again. Meanwhile any other process may end the run. All of it takes a day at most,
# asleep or awake.
_PAUSE_SECONDS = 2.0
_MAX_PAUSE_SECONDS = 300.0
_GIVE_UP_SECONDS = 86400.0
# A computer that has slept for so long has no network yet, and its user has to log in again: it has its time.
_SLEPT_SECONDS = 60.0
_AWAKE_SECONDS = 3600.0
# Time for the end of a Weights & Biases run, before the copy: no byte comes meanwhile.
_WANDB_SECONDS = 6.0
# A record that cannot be written is tried again so often: a full disk may be emptied.
_WRITES = 30


class Guardian:
    """The launcher's handle on its guardian. If it goes out of scope, the guardian acts."""

    def __init__(self, popen: subprocess.Popen[bytes], process: ProcessId) -> None:
        self._popen = popen
        self.process = process

    def alive(self) -> bool:
        """Whether it still watches."""
        return self._popen.poll() is None

    def release(self) -> None:
        """The run has ended in order, down and verified: the guardian need not act."""
        assert self._popen.stdin is not None  # start() made the pipe
        with contextlib.suppress(BrokenPipeError):
            self._popen.stdin.write(_RELEASE)
            self._popen.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout=5)


def start(record: Path) -> Guardian:
    """Start the guardian of a run and wait until it watches. Raises PreflightError."""
    with record.with_name(LOG).open("ab") as log:
        popen = subprocess.Popen(
            [*module_command("launcher.teardown.guardian"), str(record)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    assert popen.stdout is not None  # a pipe, as asked for
    readable = descriptor_polling.wait_readable([popen.stdout.fileno()], _START_SECONDS)
    process = ProcessId.of(popen.pid)
    if not readable or popen.stdout.read(len(_READY)) != _READY or process is None:
        popen.kill()
        popen.wait()
        raise PreflightError(
            "the run's guardian did not start", "nothing was started", f"less {record.with_name(LOG)}"
        )
    popen.stdout.close()
    return Guardian(popen, process)


def main(arguments: list[str]) -> int:
    """Wait for the end of the pipe; then, unless released, end the run. Exit code 0 when all is well."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    record = Path(arguments[0]).absolute()
    os.write(1, _READY)
    os.dup2(2, 1)  # nothing of ours may hang on a pipe to the launcher
    os.chdir("/")
    launch, standby = _prepare_teardown(record)
    try:
        if _released():
            return 0
        return _end(RecordStore.of_record(record), record.parent.name, launch, standby)
    finally:
        if standby is not None:
            standby.remove()


def _released() -> bool:
    """Whether the launcher released the guardian before its end of the pipe closed."""
    received = b""
    while chunk := os.read(0, 4096):
        received += chunk
    return received.endswith(_RELEASE)


def _prepare_teardown(record: Path) -> tuple[ProcessId | None, StandbyHelper | None]:
    """Prepare everything that the end of this machine needs; returns the launcher's identity and the
    standby helper."""
    launch = None
    try:
        found = RecordStore.of_record(record).load(record.parent.name)
        launch = found.launch
        return launch, machine_from_record.prepare_teardown(found)
    except Exception:  # noqa: BLE001 - at the end it is tried again
        _log(traceback.format_exc())
        return launch, None


def _end(
    store: RecordStore, run_id: str, launch: ProcessId | None, standby: StandbyHelper | None = None
) -> int:
    """End the run, unless another process does already and proves it, or another launch has taken it up."""
    pause, until = _PAUSE_SECONDS, clock.boot_seconds() + _GIVE_UP_SECONDS
    asleep, copying = clock.asleep_seconds(), last_copy.SharedLease()
    while True:
        with teardown_lock.exclusive(store.folder(run_id), "guardian", _log, insist=True) as lock:
            code = _end_exclusively(store, run_id, launch, standby, lock, copying)
        if clock.asleep_seconds() - asleep > _SLEPT_SECONDS:
            asleep, pause = clock.asleep_seconds(), _PAUSE_SECONDS
            until = max(until, clock.boot_seconds() + _AWAKE_SECONDS)
        if code == 0 or clock.boot_seconds() >= until:
            return code
        _log(f"{run_id}: not proven to be down; tried again in {pause:.0f} s")
        time.sleep(pause)
        pause = min(2 * pause, _MAX_PAUSE_SECONDS)


def _end_exclusively(
    store: RecordStore,
    run_id: str,
    launch: ProcessId | None,
    standby: StandbyHelper | None,
    lock: LockHandle,
    copying: last_copy.SharedLease,
) -> int:
    try:
        record = store.load(run_id)
    except Exception:  # noqa: BLE001 - without a record there are still the processes
        _log(traceback.format_exc())
        return (
            1
            if processes.end(lambda: process_inspection.with_variable(RUN_VARIABLE, run_id), _COMMAND_SECONDS)
            else 0
        )
    if _ended_or_resumed(record, launch):
        return 0
    gone = f"the launcher (pid {record.launch.pid if record.launch else '?'}) ended unexpectedly"
    reason = record.reason or gone
    _log(f"{run_id}: {reason}; taking the machine down")
    # From here on a full disk or a lost folder must not stop us: the machine matters, the record follows.
    _note(store, run_id, state="down", ended_by="guardian", reason=reason)
    return end_run(lock, _GuardiansEnd(store, record, standby, copying))


def _ended_or_resumed(record: RunRecord, launch: ProcessId | None) -> bool:
    """Whether the run is not that launch's any more. None: it is not known which that was."""
    return not record.live or (launch is not None and record.launch != launch)


class _GuardiansEnd:
    """The `EndPolicy` of a run whose launch is dead: nobody is there, so every error is logged and the next
    step taken. Its result is the guardian's exit code."""

    def __init__(
        self,
        store: RecordStore,
        record: RunRecord,
        standby: StandbyHelper | None,
        copying: last_copy.SharedLease,
    ) -> None:
        self._store = store
        self._record = record
        self._standby = standby
        self._copying = copying
        # Before anything here is heard of by its machine.
        self._ended_before = _self_ended(record)

    def bring_home(self, lock: LockHandle) -> None:
        """As long as bytes arrive."""
        self._copying.unpulled = _bring_home(self._store, self._record, self._copying)

    def ended_by_another(self) -> int | None:
        """0, if the record can be read and says so."""
        with contextlib.suppress(Exception):
            if _ended_or_resumed(self._store.load(self._record.id), self._record.launch):
                return 0
        return None

    def take_down(self) -> Proof:
        """Its launch is gone, and with it all of its endpoint but the token. The user's program may be left,
        and an abandoned copy."""
        with contextlib.suppress(Exception):
            delete_token(self._store.folder(self._record.id))
        proof = _take_down(self._record, self._standby)
        _end_own_children()
        _log(f"{self._record.id}: {proof.detail}")
        return proof

    def write_record(self, proof: Proof) -> int:
        """0 if the end is proven."""
        ended = self._record.now() if self._ended_before is None else self._ended_before
        changes = end_fields(proof, "guardian", ended, self._copying.unpulled)
        for _ in range(_WRITES):
            if _note(self._store, self._record.id, **changes):
                break
            time.sleep(_PAUSE_SECONDS)
        if not proof.verified:
            return 1  # and it is tried again
        trackio_process.write(self._record, _log)
        return 0


def _self_ended(record: RunRecord) -> float | None:
    """The latest time at which a machine that is gone can have ended itself: it was paid for until then.
    None if that time is still to come, or the machine is still there."""
    latest = self_termination.latest_end(record)
    if latest is None or latest >= record.now():
        return None
    try:
        cast("Machine", from_record(record)).ended()
    except JobFailed:
        return latest
    except Exception as error:  # noqa: BLE001 - then nothing proves that it is gone
        _log(described(error))
    return None


def _bring_home(store: RecordStore, record: RunRecord, copying: last_copy.SharedLease) -> str | None:
    """Download the results that would go with the machine's disk, as long as bytes arrive; the reason, if
    that failed."""
    before = copying.unpulled if copying.begun() else record.unpulled
    # Missing results are tried again while the lease lasts that all tries of this guardian share.
    again = copying.is_running() and before is not None and not record.given_up
    if record.state in ("down", "unverified") and not again:  # an earlier process had ended it so far
        return before
    if not record.may_have_results:
        return None
    given_up = abandon_results.was_requested(store, record.id)
    if record.logs_to_wandb and not record.given_up:
        take_down.close_wandb(record, _log, _WANDB_SECONDS)
    try:
        why = last_copy.copy_results(
            record,
            store.folder(record.id),
            lambda stopped: _bring(store, record, stopped),
            given_up,
            copying,
        )
    except Exception as error:  # noqa: BLE001 - after any error the machine must end
        why = described(error)
    if why is not None:
        _log(f"{record.id}: its newest results are lost with it: {why}")
    return why


def _bring(store: RecordStore, record: RunRecord, stopped: Stopped) -> str | None:
    machine = from_record(record)
    if isinstance(machine, NoMachine) or not cast("Machine", machine).ephemeral:
        return None
    if record.given_up:
        return "the user gave them up"
    return cast("Machine", machine).pull(store.folder(record.id) / RESULTS, no_progress, stopped).lost


def _take_down(record: RunRecord, standby: StandbyHelper | None) -> Proof:
    """End the machine and the user's command, with proof."""
    try:
        machine = from_record(record, standby)
        return machine_from_record.end_machine(machine, _log, lambda: _end_command(record))
    except Exception as error:  # noqa: BLE001 - any error is recorded, and tried again
        _log(traceback.format_exc())
        return Proof(False, f"the guardian failed: {error!r}")


def _end_own_children() -> None:
    """End an abandoned copy, which waits for a machine that is gone."""
    own = ProcessId.own()
    processes.end(lambda: processes.tree({own}) - {own}, 0)


def _end_command(record: RunRecord) -> None:
    """End the rest of the user's command, and the minder."""
    minder = {record.minder} if record.minder else set()
    processes.end(
        lambda: processes.tree(minder) | process_inspection.with_variable(RUN_VARIABLE, record.id),
        _COMMAND_SECONDS,
    )


def _note(store: RecordStore, run_id: str, **changes: Any) -> bool:
    """Whether the update of the record succeeded."""
    try:
        store.update(run_id, **changes)
    except FileNotFoundError:  # the run's folder is gone: there is no record to write
        _log(traceback.format_exc())
        return True
    except Exception:  # noqa: BLE001 - after any error the machine comes before its record
        _log(traceback.format_exc())
        return False
    return True


def _log(text: str) -> None:
    """A line in guardian.log."""
    with contextlib.suppress(OSError):
        os.write(2, f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {text}\n".encode())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
