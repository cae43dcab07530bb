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


def resolve(flags: Mapping[str, Any], home: Home) -> Value:
    """The adapter's folder as the value of `model`. Raises UsageError for what says two things at once."""
    text = str(flags["from"])
    if flags.get("resume") is not None:
        raise UsageError(
            "--from cannot be used with --resume",
            "--from begins a new run with what another has learned, --resume goes on with the run itself",
            f"launch --resume {flags['resume']}",
        )
    if flags.get("model") is not None:
        raise UsageError(
            "--from cannot be used with --model",
            "the run's own base model is what its adapter belongs to",
            f"launch --from {text}",
        )
    return Value(str(run_weights.find_weights(RecordStore(home), text).folder), f"--from {text}")
