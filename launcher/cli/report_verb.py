"""`launch report`: one run, or several beside each other, as a folder that opens from a disk, or as a plot.

Neighbours: `results_commands.py` calls, `dashboard/page_folder.py` makes the folder, `results/plot.py` the
plot. Uses no runtime and no network: it works for a live run, and for one that ended long ago.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launcher.base.errors import EXIT_OK, PreflightError, UsageError
from launcher.base.home import Home
from launcher.console.output import Output
from launcher.dashboard import page_folder
from launcher.dashboard.pages import Pages
from launcher.records.endpoint import RESULTS
from launcher.records.records import RecordStore, RunRecord
from launcher.results import plot
from launcher.results.run_history import RunHistory

_COMPARISON = "comparison"


def report(output: Output, names: Sequence[str], to: Path | None) -> int:
    """Write these runs' page or plot; the path of what opens is the answer."""
    if to is not None and to.suffix and to.suffix.lower() not in plot.FORMATS and not to.is_dir():
        raise UsageError(
            f"a report cannot be a {to.suffix}",
            f"it is a folder, or a plot: {', '.join(plot.FORMATS)}",
            f"launch report {' '.join(names)} --to {to.with_suffix('')}",
        )
    store = RecordStore(Home.find())
    records = list({record.id: record for record in map(store.load, names)}.values())
    pages = Pages(store, records[0].id, [record.id for record in records])
    histories = {record.id: pages.of(record.id).history(record) for record in records}
    drawn = [record for record in records if not pages.of(record.id).is_empty]
    if not drawn:
        raise _nothing(records)
    for record in records:
        if record not in drawn:
            output.note(f"{_label(record)} is left out: it has no step and no validation yet")
    if to is not None and to.suffix.lower() in plot.FORMATS:
        shown = to
        names_used = Counter(map(_label, drawn))
        labels = {it.id: _label(it) if names_used[_label(it)] == 1 else f"{it.name} {it.id}" for it in drawn}
        plot.write(to, {labels[record.id]: histories[record.id] for record in drawn})
    else:
        shown = _write_page(output, store, drawn, to)
    runs = [_described(record, histories[record.id]) for record in drawn]
    output.result({"file": str(shown), "runs": runs}, str(shown))
    return EXIT_OK


def _write_page(output: Output, store: RecordStore, records: Sequence[RunRecord], to: Path | None) -> Path:
    name = page_folder.FOLDER if len(records) == 1 else _COMPARISON
    target = to.resolve() if to else store.folder(records[0].id) / RESULTS / name
    if target.exists() and not page_folder.is_page(target) and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(
            f"{target} holds something else",
            "a report replaces a report, and nothing more",
            f"launch report {' '.join(map(_label, records))} --to {target / name}",
        )
    current = records[0].id if len(records) == 1 else None
    pages = Pages(store, current, [record.id for record in records])
    with output.busy("writing the report", "the texts of all steps go into it"):
        return page_folder.write(pages, target)


def _label(record: RunRecord) -> str:
    return record.name or record.id


def _nothing(records: Sequence[RunRecord]) -> PreflightError:
    labels = ", ".join(map(_label, records))
    live = next((record for record in records if record.live), None)
    hint = f"launch logs {_label(records[0])}" if live is None else f"launch status {_label(live)}"
    why = (
        "none of its steps and validations is on this computer"
        if len(records) == 1
        else "no run has a step or a validation"
    )
    return PreflightError(f"there is nothing to show yet for {labels}", why, hint)


def _described(record: RunRecord, history: RunHistory) -> dict[str, Any]:
    return {
        "id": record.id,
        "label": _label(record),
        "steps": len(history.steps),
        "validations": len(history.validations),
        "trained": [asdict(it) for it in history.trained],
        "alarms": [asdict(it) for it in history.alarms],
    }
