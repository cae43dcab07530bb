"""The settings that the page of a run shows: those it was launched with, and those its steps were taken with.

A program may ask for others for its steps (`GRPO(train_kwargs=…)`), and has settings of its own: how many
examples, how many rollouts, which metric. Neighbours: `run_page_data.py` asks. Reads files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from launcher.records.records import RunRecord
from launcher.results import compile_records, run_history
from launcher.results.journals import METRICS, read_lines, read_newest_lines
from launcher.results.rollout_texts import redact

_STEPS = "train."
# What an optimizer's journal calls its settings, and what its users call them.
_OPTIMIZERS = {
    "metric": "metric", "examples": "trainset", "seed": "seed", "steps": "num_train_steps",
    "examples_per_step": "num_dspy_examples_per_grpo_step", "rollouts": "num_rollouts_per_grpo_step",
}  # fmt: skip


def settings_of(record: RunRecord, results: Path, machine: Path | None) -> list[dict[str, Any]]:
    """Name, value and source of each setting, the program's first. `machine`: its folder, if that is here."""
    rows = {it["name"]: it for it in (*_of_optimizer(results), *_launched(record))}
    for row in _of_steps(results, machine):
        known = rows.get(row["name"])
        if known is None or known["value"] != row["value"]:
            rows[row["name"]] = row
    return redact([*rows.values()])


def _launched(record: RunRecord) -> Iterator[dict[str, Any]]:
    """An older record has no sources."""
    details = record.details
    sources, unknown = run_history.mapping(details.get("sources")), "sources" not in details
    values = {**run_history.mapping(details.get("settings")), **run_history.mapping(details.get("runtime"))}
    for name, value in values.items():
        source = "not recorded" if unknown else str(sources.get(name, "default"))
        yield {"name": name, "value": value, "source": source}


def _of_steps(results: Path, machine: Path | None) -> Iterator[dict[str, Any]]:
    """Those of the newest step, which has all of them resolved; where it stands in a schedule is none."""
    for line in read_newest_lines(run_history.longest_copy(results, machine, METRICS)):
        if settings := run_history.mapping(line.get("settings")):
            for name, value in settings.items():
                if name != "schedule_step":
                    yield {"name": f"{_STEPS}{name}", "value": value, "source": f"step {line.get('step')}"}
            return


def _of_optimizer(results: Path) -> Iterator[dict[str, Any]]:
    """Those of the newest compile; none for another loop."""
    compiles = [it for it in read_lines(results / compile_records.JOURNAL) if it.get("kind") == "compile"]
    newest: Mapping[str, Any] = compiles[-1] if compiles else {}
    for name, shown in _OPTIMIZERS.items():
        if (value := newest.get(name)) is not None:
            yield {"name": f"GRPO.{shown}", "value": value, "source": str(newest.get("program", ""))}
