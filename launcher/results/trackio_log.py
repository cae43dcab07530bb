"""Writes a run into Trackio's files, from its journals at home: each step and each validation once.

    python -m launcher.results.trackio_log RUN      (the run's folder; it ends after its stdin has ended)

Trackio's storage is written itself, without `trackio.init`: that asks the hub for the user's name, and writes
in a thread that a kill takes along. The content follows from the journals alone, so this may be killed,
repeated, and done by two at once. The only file that imports trackio, in a process of its own: it takes 2 s.
Neighbours: `trackio_process.py` starts it; `runtime/shared/tracker_rows.py` has the rows, as for W&B.
"""

from __future__ import annotations

import datetime
import os
import sqlite3
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.base import descriptor_polling
from launcher.records.endpoint import RESULTS
from launcher.records.records import RecordStore, RunRecord
from launcher.results.journals import read_lines
from runtime.shared import tracker_rows, validations

_LOOK_SECONDS = 2.0
_METRICS = "metrics.jsonl"
# The program, and on this computer the runtime, come first.
_NICE = 10


@dataclass(frozen=True)
class _Row:
    """One row of Trackio. `step` is its place on the axis: of a validation, the version that was scored."""

    kind: str
    step: int
    time: float
    figures: dict[str, Any]

    def id(self, run_id: str) -> str:
        """Trackio takes a row once under its id."""
        return f"{run_id}/{self.kind}/{self.step}/{self.time}"


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
        self._written: set[str] | None = None

    def update(self) -> None:
        """Write the new rows; all of them at first, and when a lost machine has taken some back. Raises
        OSError and sqlite3.Error."""
        rows = {row.id(self._run["run_id"]): row for row in _rows(self._results)}
        if self._written is None or self._written - rows.keys():
            self._storage.delete_run(self._project, **self._run)
            self._written = set()
        new = [key for key in rows if key not in self._written]
        if new:
            self._storage.bulk_log(
                self._project,
                **self._run,
                metrics_list=[rows[key].figures for key in new],
                steps=[rows[key].step for key in new],
                timestamps=[_iso(rows[key].time) for key in new],
                log_ids=new,
                config=self._config,
            )
        self._written |= set(new)


def _rows(results: Path) -> list[_Row]:
    """In the order of their times. Of several lines of one validation the last one counts."""
    return sorted(_unordered_rows(results), key=lambda row: row.time)


def _unordered_rows(results: Path) -> Iterator[_Row]:
    for line in read_lines(results / _METRICS):
        yield from _row("train", line, "step", tracker_rows.step_row)
    scored = {validations.key_of(line): line for line in validations.read(results / validations.FILE)}
    for (compile_id, _, name), line in scored.items():
        yield from _row(f"val/{compile_id}/{name}", line, "version", tracker_rows.validation_row)


def _row(
    kind: str, line: Mapping[str, Any], step: str, figures: Callable[[Mapping[str, Any]], dict[str, Any]]
) -> Iterator[_Row]:
    """None of a damaged line: they come from a machine."""
    try:
        yield _Row(kind, int(line[step] or 0), float(line["time"]), figures(line))
    except (KeyError, TypeError, ValueError, AttributeError):
        return


def _iso(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat()


def main(arguments: list[str]) -> int:
    """Follow the run until stdin ends, and write the rest; 1 if that failed."""
    os.nice(_NICE)
    folder = Path(arguments[0])
    log = TrackioLog(RecordStore.of_record(folder / "record.json").load(folder.name))
    is_over, failure = False, None
    while not is_over:
        is_over = bool(descriptor_polling.wait_readable([0], _LOOK_SECONDS))
        try:
            log.update()
            failure = None
        except (OSError, sqlite3.Error) as error:  # such as a full disk, which may be emptied
            failure = f"{type(error).__name__}: {error}"
    if failure is not None:
        print(failure, file=sys.stderr)  # noqa: T201 - to the file that its starter reads
    return 0 if failure is None else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
