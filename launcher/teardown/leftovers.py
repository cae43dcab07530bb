"""Finds the leftovers of local runs, and removes them.

`find_leftovers` finds, `remove` removes one find. Only ours: a process is ended when its environment names a
run of this home and that run is over, unknown or left alone; processes and files of another home's run are
not touched. A live run of another computer or container that shares this home is named and left alone.
Neighbours: `teardown_verbs.py` has `launch gc`, `take_down.py` ends a run; `records.py` has the records.
Knows nothing of the terminal.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher.base import process_inspection, processes
from launcher.base.errors import LaunchError, TeardownUnverified
from launcher.base.home import Home
from launcher.base.processes import ProcessId
from launcher.base.units import format_duration
from launcher.console.output import phase_name
from launcher.records.endpoint import RESULTS
from launcher.records.records import ID_PATTERN, RUN_VARIABLE, RecordStore, RunRecord
from launcher.teardown import take_down

# An environment that was not used for so long is offered for removal.
IDLE_SECONDS = 7 * 86400.0
_GRACE_SECONDS = 5.0
# Younger sockets may be of a run that has begun since the records were read.
_SOCKETS_SECONDS = 600.0
# In the environment of a run's processes: paths that name the home the run belongs to.
_HOME_VARIABLES = ("PYTHONPATH", "LAUNCH_RUN_DIR")
_STEP = re.compile(r"step-(\d+)")
_PARTIAL_FILES = (
    "results/.incoming-*", "results/**/.*.tmp", ".record.json.tmp", ".skypilot.going", "skypilot-spare*",
    ".skypilot-spare*.going",
    "machine/steps/.tmp-*", "machine/checkpoints/.tmp-*",
)  # fmt: skip


@dataclass(frozen=True)
class Leftover:
    """One leftover. `kind` is a word for `--json`; `remove` removes it, or raises LaunchError."""

    kind: str
    what: str
    why: str
    remove: Callable[[], str]
    run_id: str | None = None
    pids: tuple[int, ...] = ()
    path: Path | None = None

    def to_dict(self) -> dict[str, Any]:
        """The find as `--json` shows it."""
        path = str(self.path) if self.path else None
        return {
            "kind": self.kind, "what": self.what, "why": self.why, "run_id": self.run_id,
            "pids": list(self.pids), "path": path,
        }  # fmt: skip


def find_leftovers(
    home: Home,
    older_than_seconds: float | None,
    unpulled: bool,
    idle_seconds: float,
    given_up: Collection[str] = (),
    note: Callable[[str], None] = take_down.no_progress,
) -> list[Leftover]:
    """All leftovers. Old runs' folders only if `older_than_seconds` is given; environments that were not
    used for `idle_seconds`. `given_up`: the runs, by name or id, that end without results."""
    store = RecordStore(home)
    # Processes before records: a run that starts meanwhile is then in neither, or known and live.
    run_processes, carried = _run_processes(home), {run_id for run_id, *_ in _all_run_processes()}
    records = {record.id: record for record in store.list()}
    unreadable = {record.id for record in store.unreadable()}
    finds = [*_unattended_runs(store, records.values(), given_up, note)]
    finds += _stray_processes(store, home, records, unreadable, run_processes)
    finds += _stale_sockets(home, records, unreadable, carried, note)
    if not any(record.elsewhere for record in records.values()):  # it may run from any of them
        finds += _environments(home, idle_seconds)
    finds += _partial_files(store, records.values())
    finds += _benches(home, older_than_seconds, note)
    if older_than_seconds is not None:
        finds += _old_runs(store, records.values(), older_than_seconds, unpulled)
    return finds


# ------------------------------------------------------------------ runs


def _unattended_runs(
    store: RecordStore,
    records: Iterable[RunRecord],
    given_up: Collection[str],
    note: Callable[[str], None],
) -> Iterator[Leftover]:
    """Live runs whose launch and guardian are both gone. A run that may be alive elsewhere is only named."""
    for record in records:
        if record.elsewhere:
            note(skipped_run_note(record))
        if not record.live or record.is_attended:
            continue

        def remove(record: RunRecord = record) -> str:
            if not (now := store.load(record.id)).live or now.is_attended:
                return "its run is still alive" if now.live else "down: verified"
            give_up = not {now.id, now.name}.isdisjoint(given_up)
            ended = take_down.take_down(store, now, "gc", note, give_up=give_up)
            without = f"; without its newest results: {ended.unpulled}" if ended.unpulled else ""
            return f"down: verified{without}"

        why = f"its phase is {phase_name(record.state)}, and neither its launch nor its guardian is alive"
        yield Leftover("run", f"run {record.name or record.id}", why, remove, record.id)


def skipped_run_note(record: RunRecord) -> str:
    """The note about a live run whose processes cannot be seen here."""
    label = record.name or record.id
    return f"{label} lives on {record.location}: left alone; launch down {label} ends it"


# ------------------------------------------------------------------ processes


def _stray_processes(
    store: RecordStore,
    home: Home,
    records: dict[str, RunRecord],
    unreadable: set[str],
    run_processes: dict[str, set[ProcessId]],
) -> Iterator[Leftover]:
    """Processes of this home's runs that are over or have no record (any more)."""
    for run_id, found in sorted(run_processes.items()):
        record = records.get(run_id)
        if run_id in unreadable or (record is not None and record.live):
            continue  # a broken record is shown by `status`; a live run is looked after, or a find of its own
        if record is None and not all(map(process_inspection.in_our_namespace, found)):
            continue  # a container's own home may have the same path as this one
        why = "the run is over" if record else f"there is no record of it in {home.runs}"

        def remove(run_id: str = run_id) -> str:
            if any(known.live for known in store.list() if known.id == run_id):
                return "it is still alive"
            left = processes.end(lambda: _run_processes(home).get(run_id, set()), _GRACE_SECONDS)
            if left:
                pids = ", ".join(str(process.pid) for process in sorted(left))
                raise TeardownUnverified(f"processes of {run_id} still run", pids, f"kill -9 {pids}")
            return "ended"

        pids = tuple(sorted(process.pid for process in found))
        names = ", ".join(f"{process.pid} {process_inspection.name_of(process)}" for process in sorted(found))
        yield Leftover("processes", f"processes of {run_id}: {names}", why, remove, run_id, pids)


def _all_run_processes() -> Iterator[tuple[str, ProcessId, dict[str, str]]]:
    """Every process that carries a run's id, whosever run: the id, the process and its environment."""
    for process, environ in process_inspection.environments():
        run_id = environ.get(RUN_VARIABLE, "")
        if ID_PATTERN.fullmatch(run_id):
            yield run_id, process, environ


def _run_processes(home: Home) -> dict[str, set[ProcessId]]:
    """The processes whose environment names a run of this home, by run."""
    found: dict[str, set[ProcessId]] = {}
    for run_id, process, environ in _all_run_processes():
        paths = [path for name in _HOME_VARIABLES for path in environ.get(name, "").split(os.pathsep) if path]
        folder = os.path.realpath(home.run_folder(run_id))
        ours = any(os.path.realpath(path).startswith(folder + os.sep) for path in paths)
        if ours:
            found.setdefault(run_id, set()).add(process)
    return found


# ------------------------------------------------------------------ files


def socket_parents() -> list[Path]:
    """Where runs of this user may have their socket folders (`backends/local_machine.py`)."""
    return list(dict.fromkeys((Path(tempfile.gettempdir()), Path("/tmp"))))


def _stale_sockets(
    home: Home,
    records: dict[str, RunRecord],
    unreadable: set[str],
    carried: set[str],
    note: Callable[[str], None],
) -> Iterator[Leftover]:
    """Socket folders of this home's runs that are over, or that have neither a record nor a process. Those of
    other homes, or of no home that could be named, are only counted."""
    from launcher.backends.local_machine import owner_of

    strange: list[Path] = []
    for folder, age in _socket_folders():
        run_id = folder.name
        record = records.get(run_id)
        if run_id in carried or run_id in unreadable or (record is not None and record.live):
            continue
        if record is None and age < _SOCKETS_SECONDS:
            continue
        if record is None and owner_of(folder) != os.path.realpath(home.run_folder(run_id)):
            strange.append(folder)
            continue
        why = "the run is over" if record else "no record and no process of the run is left"
        yield _folder_leftover("sockets", f"sockets of {run_id}", why, folder, run_id)
    if strange:
        note(_strange_sockets_note(strange))


def _socket_folders() -> Iterator[tuple[Path, float]]:
    """This user's folders that are named like runs, where runs have their sockets; their ages in seconds."""
    for parent in socket_parents():
        for folder in sorted(parent.glob("slip-*")):
            try:
                seen = folder.lstat()
            except OSError:
                continue
            if ID_PATTERN.fullmatch(folder.name) and seen.st_uid == os.getuid():
                yield folder, time.time() - seen.st_mtime


def _strange_sockets_note(folders: list[Path]) -> str:
    count, one = len(folders), len(folders) == 1
    return (
        f"left alone: {count} socket folder{'' if one else 's'} of runs that this home does not know, "
        f"such as {folders[0]}; another home (LAUNCH_HOME) may own {'it' if one else 'them'}"
    )


def _environments(home: Home, idle_seconds: float) -> Iterator[Leftover]:
    from launcher.backends import environments

    root = home.environments
    if not root.is_dir():
        return
    for folder in environments.incomplete(root):
        yield _folder_leftover(
            "half-built", f"half-built environment {folder.name}", "the process that built it is gone", folder
        )
    for folder in environments.outdated(root):
        idle = time.time() - environments.last_used(folder)
        if idle < idle_seconds or process_inspection.runs_from(folder):
            continue

        def remove(folder: Path = folder) -> str:
            environments.remove(folder)
            return "removed"

        why = f"this version does not use it; last used {format_duration(idle)} ago"
        yield Leftover("environment", f"environment {folder.name}", why, remove, path=folder)


def _partial_files(store: RecordStore, records: Iterable[RunRecord]) -> Iterator[Leftover]:
    """The half-written files that a kill left in the folders of runs that are over."""
    for record in records:
        if record.live:
            continue
        for pattern in _PARTIAL_FILES:
            for path in sorted(store.folder(record.id).glob(pattern)):
                what = f"half-written {path.relative_to(store.runs)}"
                yield _unless_live(
                    store, _folder_leftover("debris", what, "the run is over", path, record.id)
                )


def _old_runs(
    store: RecordStore, records: Iterable[RunRecord], older_than_seconds: float, unpulled: bool
) -> Iterator[Leftover]:
    """Files of old runs beside their results: checkpoints, samples, batches. Results and record stay, so that
    the run can still be resumed after its last durable step."""
    for record in records:
        folder = store.folder(record.id) / "machine"
        age = time.time() - (record.ended or record.created)
        if record.live or age < older_than_seconds or not folder.is_dir():
            continue
        if not unpulled and not results_are_home(store.folder(record.id)):
            continue
        why = f"ended {format_duration(age)} ago; its results and durable steps stay"
        what = f"checkpoints and samples of {record.name or record.id}"
        yield _unless_live(store, _folder_leftover("old run", what, why, folder, record.id))


def _benches(home: Home, older_than_seconds: float | None, note: Callable[[str], None]) -> Iterator[Leftover]:
    """The runs of old benches, each in a home of its own; and the runs there that are left alone."""
    homes = sorted(home.benches.glob("*/*/home"))
    busy = (
        {environ.get("LAUNCH_HOME") for _, environ in process_inspection.environments()} if homes else set()
    )
    for own in homes:
        store = RecordStore(Home(own, own, own / "cache"))
        records = store.list()
        yield from _unattended_runs(store, records, (), note)
        if older_than_seconds is None or str(own) in busy or any(it.live for it in records):
            continue
        ended = [own.stat().st_mtime, *(it.ended or it.created for it in records)]
        if (age := time.time() - max(ended)) < older_than_seconds:
            continue
        why = f"ended {format_duration(age)} ago; its figures and logs stay"
        what = f"runs of bench {own.parent.parent.name}, {own.parent.name}"
        yield _folder_leftover("old bench", what, why, own)


def results_are_home(folder: Path) -> bool:
    """Whether the newest checkpoint of a run's folder is among its results; True if there is none."""
    steps = [
        match for path in folder.glob("machine/checkpoints/step-*") if (match := _STEP.fullmatch(path.name))
    ]
    newest = max((int(match[1]) for match in steps), default=0)
    if newest == 0:
        return True
    try:
        return int(json.loads((folder / RESULTS / "adapter" / "state.json").read_text())["step"]) >= newest
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _unless_live(store: RecordStore, find: Leftover) -> Leftover:
    """The same, left alone when its run was taken up again meanwhile (`launch --resume`)."""

    def remove() -> str:
        assert find.run_id is not None  # it is in a run's folder
        return "its run is alive again" if store.load(find.run_id).live else find.remove()

    return replace(find, remove=remove)


def _folder_leftover(kind: str, what: str, why: str, path: Path, run_id: str | None = None) -> Leftover:
    def remove() -> str:
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        except FileNotFoundError:
            return "already gone"
        except OSError as error:
            raise LaunchError(f"{path} cannot be removed", error.strerror, f"ls -la {path}") from error
        return "removed"

    return Leftover(kind, what, why, remove, run_id, path=path)
