"""Writes a run into Trackio's files, from its journals at home: each step and each validation once.

    python -m launcher.results.trackio_log RUN        (the run's folder; it ends after its stdin has ended)
    python -m launcher.results.trackio_log --check PROJECT        (whether Trackio takes this name)

Trackio's storage is written itself, without `trackio.init`: that asks the hub for the user's name, and writes
in a thread that a kill takes along. The content follows from the journals alone, so this may be killed,
repeated, and done by two at once. Only rows that it wrote itself are ever deleted: those of a step that was
taken again. The only file that imports trackio, in a process of its own: it takes 2 s. Neighbours:
`trackio_process.py` starts it; `runtime/shared/tracker_rows.py` has the rows, as for W&B.
"""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.base import descriptor_polling
from launcher.records.endpoint import RESULTS
from launcher.records.records import RecordStore, RunRecord
from launcher.results.journals import METRICS, read_lines
from runtime.shared import tracker_rows, validations

_LOOK_SECONDS = 2.0
# The program, and on this computer the runtime, come first.
_NICE = 10


@dataclass(frozen=True)
class _Row:
    """One row of Trackio. `step` is its place on the axis: of a validation, the version that was scored."""

    kind: str
    step: int
    time: float
    figures: dict[str, Any]

    @property
    def place(self) -> str:
        """A step that is taken again has the same place and another time."""
        return f"{self.kind}/{self.step}"

    @property
    def iso_time(self) -> str:
        return datetime.datetime.fromtimestamp(self.time, datetime.UTC).isoformat()


class TrackioLog:
    """One run in Trackio's files, which are in the folder TRACKIO_DIR."""

    def __init__(self, record: RunRecord) -> None:
        from trackio.sqlite_storage import SQLiteStorage

        self._storage = SQLiteStorage
        self._results = record.folder / RESULTS
        runtime: Mapping[str, Any] = record.details["runtime"]
        self._project = str(runtime["wandb_project"])
        SQLiteStorage.validate_project_name(self._project)
        self._run = {"run": record.name or record.id, "run_id": record.id}
        self._config = {"model": record.details.get("model_path"), **runtime}
        self._seen: list[tuple[int, int]] | None = None

    def update(self) -> None:
        """Write what the journals have and Trackio has not. Raises OSError and sqlite3.Error."""
        seen = [_size_and_time(self._results / name) for name in (METRICS, validations.FILE)]
        if seen == self._seen:
            return
        rows = {f"{self._run['run_id']}/{it.place}/{it.time}": it for it in _rows(self._results)}
        if rows:
            written = self._prepare(rows)
            self._write({key: row for key, row in rows.items() if key not in written})
        self._seen = seen

    def _prepare(self, rows: Mapping[str, _Row]) -> set[str]:
        """The ids of our rows that are there, after those are gone whose step was taken again."""
        path = self._storage.init_db(self._project)
        run_id = self._run["run_id"]
        places = {f"{run_id}/{row.place}" for row in rows.values()}
        with self._storage._get_process_lock(self._project), self._storage._get_connection(path) as database:
            found = database.execute("SELECT log_id FROM metrics WHERE run_id = ?", (run_id,))
            written = {str(row[0]) for row in found}
            old = {key for key in written - rows.keys() if key.rpartition("/")[0] in places}
            deleted = [(run_id, key) for key in old]
            database.executemany("DELETE FROM metrics WHERE run_id = ? AND log_id = ?", deleted)
        return written

    def _write(self, rows: Mapping[str, _Row]) -> None:
        if rows:
            self._storage.bulk_log(
                self._project,
                **self._run,
                metrics_list=[row.figures for row in rows.values()],
                steps=[row.step for row in rows.values()],
                timestamps=[row.iso_time for row in rows.values()],
                log_ids=[*rows],
                config=self._config,
            )


def _size_and_time(path: Path) -> tuple[int, int]:
    """Of a file that may be missing."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return (0, 0)
    return (found.st_size, found.st_mtime_ns)


def _rows(results: Path) -> list[_Row]:
    """In the order of their times. Of several lines of one validation the last one counts."""
    return sorted(_unordered_rows(results), key=lambda row: row.time)


def _unordered_rows(results: Path) -> Iterator[_Row]:
    for line in read_lines(results / METRICS):
        yield from _row("train", line, "step", tracker_rows.step_row)
    scored = {validations.key_of(line): line for line in validations.read(results / validations.FILE)}
    for (compile_id, _, name), line in scored.items():
        yield from _row(f"val/{compile_id}/{name}", line, "version", tracker_rows.validation_row)


def _row(
    kind: str, line: Mapping[str, Any], step: str, figures: Callable[[Mapping[str, Any]], dict[str, Any]]
) -> Iterator[_Row]:
    """None of a damaged line: they come from a machine."""
    try:
        row = _Row(kind, int(line[step] or 0), float(line["time"]), figures(line))
        if row.iso_time and all(map(_is_storable, (row.step, *row.figures, *row.figures.values()))):
            yield row
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, OSError):
        return


def _is_storable(value: object) -> bool:
    """Whether SQLite and JSON can hold it. Raises UnicodeEncodeError for half a character."""
    if isinstance(value, str):
        value.encode()
    return not isinstance(value, int) or -_INT64 <= value < _INT64


_INT64 = 2**63


def main(arguments: list[str]) -> int:
    """Follow the run until stdin ends, and write the rest; 1 if that failed, with the reason on stderr."""
    if arguments[0] == "--check":
        failure = _refusal(arguments[1])
    else:
        os.nice(_NICE)
        failure = _follow(Path(arguments[0]))
    if failure is not None:
        print(failure, file=sys.stderr)  # noqa: T201 - to the file that its starter reads
    return 0 if failure is None else 1


def _refusal(project: str) -> str | None:
    from trackio.sqlite_storage import SQLiteStorage

    try:
        SQLiteStorage.validate_project_name(project)
    except ValueError as error:
        return str(error)
    name = SQLiteStorage.get_project_db_filename(project)
    return f"its file's name is too long: {name}" if len(name.encode()) > _LONGEST_NAME else None


# With room for what SQLite and Trackio append.
_LONGEST_NAME = 200


def _follow(folder: Path) -> str | None:
    log = TrackioLog(RecordStore.of_record(folder / "record.json").load(folder.name))
    is_over, failure = False, None
    while not is_over:
        is_over = bool(descriptor_polling.wait_readable([0], _LOOK_SECONDS))
        try:
            log.update()
            failure = None
        except Exception as error:  # noqa: BLE001 - such as a full disk, which may be emptied
            failure = f"{type(error).__name__}: {error}"
    return failure


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
