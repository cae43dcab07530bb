"""Resolves `--from`: the adapter of an earlier run, in the place of `--model`.

Neighbours: `setting_sources.py` asks, `results/run_weights.py` finds it. Only reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.base.errors import UsageError
from launcher.base.home import Home
from launcher.records.records import RecordStore
from launcher.results import run_weights
from launcher.types.settings import Value


def adapter_of_run(flags: Mapping[str, Any], home: Home) -> Value:
    """The adapter's folder as the value of `model`. Raises UsageError for contradictory options."""
    text = str(flags["from"])
    if flags.get("resume") is not None:
        raise UsageError(
            "--from cannot be used with --resume",
            "--from starts a new run from another run's adapter, --resume continues the run itself",
            f"launch --resume {flags['resume']}",
            without=("from",),
        )
    if flags.get("model") is not None:
        raise UsageError(
            "--from cannot be used with --model",
            "the run's adapter belongs to its own base model",
            f"launch --from {text}",
            without=("model",),
        )
    return Value(str(run_weights.find_weights(RecordStore(home), text).folder), f"--from {text}")
