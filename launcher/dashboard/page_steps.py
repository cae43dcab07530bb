"""A run's steps as the page draws them: a row a step, its validations, and each version's proof.

Neighbours: `run_page_data.py` asks, `results/report_data.py` reads the data that the report has too,
`page_rollouts.py` has the staleness of a step's samples. The files come from a machine and may be damaged: a
value that is no number is left out. Sends no request.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launcher.results import report_data
from launcher.results.journals import METRICS, read_lines
from launcher.results.report_data import ReportedStep

_PUBLICATIONS = "publications.jsonl"
# Of a step's metrics, those the page draws, by the names that its rows have.
_MEASURED = {
    "deviation": "reward_deviation",
    "entropy": "entropy",
    "gradient": "grad_norm",
    "kl": "kl_reference",
    "train_seconds": "train_seconds",
}
_COUNTED = {
    "groups": "groups",
    "samples": "samples",
    "trained": "trained",
    "sampled_tokens": "sampled_tokens",
    "joined": "turns_joined",
    "sealed": "sealed",
    "unreceived": "unreceived",
    "flat_groups": "groups_without_variance",
}
# The numbers in a version's proof; those of the model check are in two parts.
_PROVEN = (
    "version", "step", "time", "seconds", "engines", "modules", "probe_tokens", "max_error", "mean_error",
    "cached_error", "effect", "stage_seconds", "verify_seconds", "probe_seconds",
)  # fmt: skip
_MAX_TEXT_LENGTH = 400


def of_run(results: Path, machine: Path | None) -> dict[str, Any]:
    """`machine`: its folder on this computer, while the run lives here."""
    data = report_data.read(results, machine, label="", run_id="", model="", state="")
    metrics = {
        line["step"]: line
        for line in read_lines(report_data.longest_copy(results, machine, METRICS))
        if isinstance(line.get("step"), int)
    }
    rows = [_row(step, metrics.get(step.step, {})) for step in data.steps]
    _add_durations(rows)
    return {
        "steps": rows,
        "validations": [asdict(it) for it in data.validations],
        "proofs": [
            _proof(it) for it in read_lines(report_data.longest_copy(results, machine, _PUBLICATIONS))
        ],
    }


def _row(step: ReportedStep, line: Mapping[str, Any]) -> dict[str, Any]:
    measured, counts = _mapping(line.get("metrics")), _mapping(line.get("counts"))
    row = asdict(step)
    row |= {name: number(measured.get(key)) for name, key in _MEASURED.items()}
    row |= {name: number(counts.get(key)) for name, key in _COUNTED.items()}
    row["dropped"] = {
        str(reason)[:_MAX_TEXT_LENGTH]: count
        for reason, it in _mapping(counts.get("dropped")).items()
        if (count := number(it))
    }
    return row | {
        "version": number(line.get("version")),
        "time": number(line.get("time")),
        "kind": str(line.get("kind", "train"))[:_MAX_TEXT_LENGTH],
    }


def _add_durations(rows: Iterable[dict[str, Any]]) -> None:
    """How long each took since the one before it, and how many tokens were sampled in a second of that."""
    before: float | None = None
    for row in rows:
        now = row["time"]
        seconds = None if before is None or now is None or now <= before else now - before
        row["seconds"] = seconds
        tokens = row["sampled_tokens"]
        row["tokens_per_second"] = tokens / seconds if seconds and tokens is not None else None
        before = now


def _proof(line: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {name: number(line.get(name)) for name in _PROVEN}
    adapter = _mapping(line.get("adapter"))
    if found["max_error"] is None and adapter:  # of the model itself, before the first step
        found |= {"max_error": number(adapter.get("largest")), "mean_error": number(adapter.get("mean"))}
    for name in ("outcome", "name", "sha256", "reason", "error", "detail"):
        found[name] = None if line.get(name) is None else str(line[name])[:_MAX_TEXT_LENGTH]
    return found


def number(value: Any) -> float | None:
    """A finite number; whole ones stay whole."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if abs(value) <= sys.float_info.max else None  # NaN is not either


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
