"""The verbs that end runs and remove leftovers: down and gc.

Neighbours: `commands.py` calls these, `teardown/take_down.py` ends a run, `leftovers.py` and
`rented_leftovers.py` beside it find leftovers of others, `output.py` prints. Imports no HTTP library and no
pydantic.
"""

from __future__ import annotations

import shlex
import signal
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from launcher.base import processes
from launcher.base.errors import (
    EXIT_OK,
    LaunchError,
    NotPulled,
    PreflightError,
    TeardownUnverified,
    UsageError,
    described,
)
from launcher.base.home import Home
from launcher.base.layout import columns
from launcher.base.processes import ProcessId
from launcher.base.units import parse_duration
from launcher.console import consent
from launcher.console.output import Output
from launcher.records import teardown_lock
from launcher.records.records import RecordStore, RunRecord
from launcher.results import trackio_process
from launcher.teardown import leftovers, take_down

if TYPE_CHECKING:
    from launcher.backends.skypilot.orphaned_machines import OrphanReport

# The time that the run's own `launch` gets to begin its end after the signal: its program may be saving.
_ORDERLY_SECONDS = 180.0
# While it waits for results that do not come, the user of `launch down` waits with it for so long.
_KEEPING_SECONDS = take_down.TRIES_SECONDS
_POLL_SECONDS = 0.25
# Before a provider has answered there is no machine to end, and then there may be one.
_BEFORE_MACHINE = ("created", "arm")
_PROGRESS_SECONDS = 20.0


def down(output: Output, name: str, give_up: bool = False, elsewhere: bool = False) -> int:
    """End a run, whichever process started it, and prove it. `give_up`: its results may be lost with its
    machine. `elsewhere`: also end a run that lives on another computer or container.

    Raises NotPulled when the machine is kept for the results, or has taken them along.
    """
    store = RecordStore(Home.find())
    record = store.load(name)
    was_live = record.live
    if record.elsewhere:
        record = _confirm_elsewhere(output, store, record, elsewhere)
    if give_up and was_live:
        record = _record_abandoned_results(output, store, record)
    if record.live and record.launch is not None and record.launch_alive:
        record = _ask_launch_to_end(output, store, record, record.launch, name)
    record = take_down.after_guardian(store, record, output.note)
    if record.live:
        with output.busy(f"ending {name}") as progress:
            record = take_down.take_down(store, record, "down", output.note, progress, give_up=give_up)
        trackio_process.write(record, output.note)
    proof = record.proof or {"verified": True, "detail": "nothing was started"}
    message = f"{name} is down: verified ({proof['detail']})"
    if was_live and record.unpulled is not None and not give_up:
        hint = f"launch status {name}  # its results hold what was copied before"
        raise NotPulled(f"{message}; its newest results were not copied", record.unpulled, hint)
    output.result({"run_id": record.id, "down": proof, "unpulled": record.unpulled}, message)
    return EXIT_OK


def gc(
    output: Output,
    older_than: str | None,
    unpulled: bool,
    yes: bool,
    infra: Sequence[str] = (),
    given_up: Sequence[str] = (),
) -> int:
    """Show leftovers of runs and remove them, once the user agrees. The clouds in `infra` are asked
    besides those that runs were on. The runs in `given_up` end without their results."""
    try:
        seconds = None if older_than is None else parse_duration(older_than)
    except ValueError as error:
        what = f"--older-than: {older_than!r} is not valid"
        raise UsageError(what, str(error), "launch gc --older-than 7d") from None
    home = Home.find()
    for name in given_up:
        RecordStore(home).load(name)
    finds = leftovers.find_leftovers(
        home, seconds, unpulled, seconds or leftovers.IDLE_SECONDS, given_up, output.note
    )
    at_providers, seen = _find_at_providers(output, home, infra)
    finds += at_providers
    answered = _who_answered(seen)
    rows = [["LEFT", "WHY"], *([find.what, find.why] for find in finds)]
    if not finds:
        known = f"; {', '.join(answered['unasked'])} could not be asked" if answered["unasked"] else ""
        output.result({"found": [], "removed": False} | answered, f"earlier runs left nothing behind{known}")
    elif yes or _confirm_removal(output, columns(rows), len(finds)):
        return _remove(output, finds, seen)
    else:
        shown = "" if consent.can_prompt(output) else columns(rows)
        output.result({"found": [find.to_dict() for find in finds], "removed": False} | answered, shown)
        options = ["--older-than", older_than] if older_than is not None else []
        options += ["--unpulled"] if unpulled else []
        options += [word for cloud in infra for word in ("--infra", cloud)]
        options += [word for name in given_up for word in ("--give-up-results", name)]
        output.note(f"nothing was removed: {shlex.join(['launch', 'gc', *options, '--yes'])}")
    return _ended(output, _unasked(seen))


# ------------------------------------------------------------------ down


def _ask_launch_to_end(
    output: Output, store: RecordStore, record: RunRecord, launch: ProcessId, name: str
) -> RunRecord:
    """Tell the run's own `launch` to end it and wait while it does; returns the record then.

    A launch that does not begin its end in time is left running. Raises NotPulled while it keeps the machine
    for results that cannot be downloaded.
    """
    at_it = teardown_lock.owner(store.folder(record.id))
    if at_it is None or at_it.process != launch:
        output.note(f"telling launch (pid {launch.pid}) to end {name}")
        launch.send(signal.SIGTERM)
    launch.send(signal.SIGCONT)  # it may be stopped (Ctrl-Z): then it would not hear the first
    told_at = noted_at = time.monotonic()
    keeping = take_down.ResultsWait(store, record.id, _KEEPING_SECONDS)
    while not processes.wait_for_end(launch, _POLL_SECONDS) and store.load(record.id).live:
        now, at_it = time.monotonic(), teardown_lock.owner(store.folder(record.id))
        if now - noted_at > _PROGRESS_SECONDS:
            output.note(f"{name}: {at_it.describe() if at_it else 'launch has not begun to end it'}; waiting")
            noted_at = now
        if at_it is None and now - told_at > _ORDERLY_SECONDS:
            break
        keeping.check(at_it)
    return store.load(record.id)


def _confirm_elsewhere(output: Output, store: RecordStore, record: RunRecord, elsewhere: bool) -> RunRecord:
    """Show the place of a run whose processes cannot be seen here, and the effect of ending it from here.

    A rented run can be ended from here; the user is asked first if it still gives a sign of life. For any
    other run the record is closed, because the user confirms with `--elsewhere` that its computer or
    container is gone. Raises UsageError, TeardownUnverified.
    """
    label = record.name or record.id
    if not record.rented:
        if elsewhere and record.silent:
            return take_down.close_unseen(store, record)
        return record
    output.note(f"{label} lives on {record.location}; its machine is ended at its provider, from here")
    if record.silent:
        return record
    if record.state in _BEFORE_MACHINE:
        why = f"{record.location} is asking a provider for its machine"
        raise UsageError(f"{label} is starting: left alone", why, f"launch status {label}")
    if elsewhere:
        return record
    agreed = consent.can_prompt(output) and consent.confirm(output, "its launch is at work there. End it?")
    if not agreed:
        hint = f"launch down {label} --elsewhere  # ends it from here"
        raise UsageError(f"{label} is alive: left alone", f"it lives on {record.location}", hint)
    return record


def _record_abandoned_results(output: Output, store: RecordStore, record: RunRecord) -> RunRecord:
    """Write it into the record, for the run's own `launch`. A full disk must not keep the machine running."""
    try:
        return store.update(record.id, given_up=True)
    except OSError as error:
        output.note(f"cannot record that its results are given up: {error}")
        return record


# ------------------------------------------------------------------ gc


def _find_at_providers(
    output: Output, home: Home, infra: Sequence[str]
) -> tuple[list[leftovers.Leftover], OrphanReport | None]:
    """Machines at providers, and the providers that answered. None is asked if nothing was ever rented."""
    from launcher.teardown import rented_leftovers

    clouds = [*rented_leftovers.clouds(home), *infra]
    if not clouds:
        return [], None
    output.note(f"asking {', '.join(sorted(set(clouds)))} for machines of earlier runs")
    return rented_leftovers.find_rented_leftovers(home, clouds, output.note)


def _confirm_removal(output: Output, shown: str, count: int) -> bool:
    """Show the finds and ask. Without a terminal there is no question, and nothing is removed."""
    if not consent.can_prompt(output):
        return False
    output.note(shown)
    return consent.confirm(output, f"remove {'this' if count == 1 else f'these {count}'}?")


def _who_answered(seen: OrphanReport | None) -> dict[str, Any]:
    """The providers' answers as `--json` shows them."""
    if seen is None:
        return {"unasked": [], "answered": [], "denied": []}
    return {"unasked": sorted(seen.unasked), "answered": list(seen.answered), "denied": sorted(seen.denied)}


def _unasked(seen: OrphanReport | None) -> LaunchError | None:
    """The clouds whose machines are unknown: silence does not mean that there are none."""
    if seen is None or not seen.unasked:
        return None
    clouds = sorted(seen.unasked)
    return TeardownUnverified(
        f"{', '.join(clouds)} could not be asked for machines of earlier runs",
        seen.unasked[clouds[0]],
        f"sky check {clouds[0]}  # then launch gc again, or look for slip-… in its console",
    )


def _ended(output: Output, failure: LaunchError | None) -> int:
    if failure is not None and not output.as_json:
        output.error(failure)
    return failure.exit_code if failure is not None else EXIT_OK


def _remove(output: Output, finds: list[leftovers.Leftover], seen: OrphanReport | None) -> int:
    """Remove each find and show the result; the first failure decides the exit code."""
    failure: LaunchError | None = None
    described: list[dict[str, Any]] = []
    rows = [["LEFT", "NOW"]]
    for find in finds:
        try:
            done = find.remove()
        except Exception as error:  # noqa: BLE001 - an error of one must not stop the others
            refused = error if isinstance(error, LaunchError) else _refused(output, find, error)
            failure = failure or refused
            done = f"NOT removed: {refused.message}: {refused.why}"
        described.append(find.to_dict() | {"done": done})
        rows.append([find.what, done])
    _write_to_trackio(output, {find.run_id for find in finds if find.kind == "run"})
    found = {"found": described, "removed": failure is None}
    output.result(found | _who_answered(seen), columns(rows))
    return _ended(output, failure or _unasked(seen))


def _write_to_trackio(output: Output, run_ids: Collection[str | None]) -> None:
    """Of runs that are over by now: after all of them, for none may cost more because another is logged."""
    for record in RecordStore(Home.find()).list():  # a bench's run was in a home of its own
        if record.id in run_ids and not record.live:
            trackio_process.write(record, output.note)


def _refused(output: Output, find: leftovers.Leftover, error: Exception) -> LaunchError:
    """One that this computer does not let us remove, or a bug."""
    kind = PreflightError if isinstance(error, OSError) else LaunchError
    output.traceback(show=False)
    return kind(f"{find.what} could not be removed", described(error), "launch gc")
