"""`launch report`: draws one run, or several side by side, as one file from the results on this computer.

Neighbours: `commands.py` calls, `results/report_data.py` reads, `results/report_page.py` makes the page. Uses
no runtime and no network: it works for a live run, and for one that ended long ago.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher.base import atomic
from launcher.base.errors import EXIT_OK, PreflightError, UsageError
from launcher.base.home import Home
from launcher.console.output import Output
from launcher.records.endpoint import RESULTS
from launcher.records.records import RecordStore, RunRecord
from launcher.results import report_data, report_page
from launcher.results.report_data import RunData

_FORMS = {".html": report_page.html, ".svg": report_page.svg}


def report(output: Output, names: Sequence[str], to: Path | None) -> int:
    """Draw these runs; the file's path is the answer."""
    if to is not None and to.suffix.lower() not in _FORMS:
        raise UsageError(
            f"a report cannot be a {to.suffix or 'file without an ending'}",
            f"the file's ending selects the format: {' or '.join(_FORMS)}",
            f"launch report {' '.join(names)} --to {to.with_suffix('.html')}",
        )
    store = RecordStore(Home.find())
    records = list({record.id: record for record in map(store.load, names)}.values())
    runs = [_read(store, record) for record in records]
    drawn = [run for run in runs if not run.is_empty]
    if not drawn:
        raise _nothing(records, runs)
    for run in runs:
        if run.is_empty:
            output.note(f"{run.label} is left out: it has no step and no validation yet")
    file = to or store.folder(records[0].id) / RESULTS / (
        "report.html" if len(drawn) == 1 else "reports.html"
    )
    try:
        atomic.write(file, _FORMS[file.suffix.lower()](drawn))
    except OSError as error:
        why = error.strerror or str(error)
        raise PreflightError(f"cannot write {file}", why, f"df -h {file.parent}") from error
    output.result({"file": str(file), "runs": [_described(run) for run in drawn]}, str(file))
    return EXIT_OK


def _read(store: RecordStore, record: RunRecord) -> RunData:
    folder = store.folder(record.id)
    machine = record.machine.get("state_dir") if record.live else None
    return report_data.read(
        folder / RESULTS,
        Path(machine) if machine and record.machine.get("kind") == "local" else None,
        label=record.name or record.id,
        run_id=record.id,
        model=str((record.details.get("plan") or {}).get("model") or "model not known"),
        state="live" if record.live else "ended",
    )


def _nothing(records: Sequence[RunRecord], runs: Sequence[RunData]) -> PreflightError:
    labels = ", ".join(run.label for run in runs)
    live = next((record for record in records if record.live), None)
    hint = f"launch logs {runs[0].label}" if live is None else f"launch status {live.name or live.id}"
    why = (
        "none of its steps and validations is on this computer"
        if len(runs) == 1
        else "no run has a step or a validation"
    )
    return PreflightError(f"there is nothing to draw yet for {labels} yet", why, hint)


def _described(run: RunData) -> dict[str, Any]:
    return {
        "id": run.id,
        "label": run.label,
        "steps": len(run.steps),
        "validations": len(run.validations),
        "trained": run.to_dict()["trained"],
    }
