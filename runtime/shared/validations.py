"""Held-out scores of a run, as its program reported them: `validations.jsonl`, a line each.

    {"compile", "step", "name", "score", "standard_error", "examples", "parse_rate", "cut_off_rate",
     "predictors", "version", "time"}

`step` is the number of steps that the compile had taken, `version` the policy that was scored. Of several
lines of one compile, step and name the last one counts, because steps are repeated after the loss of a
machine.
Neighbours: runtime/gateway/validations.py writes, wandb_log.py and `launch report` read. Knows nothing of
HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE = "validations.jsonl"


def key_of(line: Mapping[str, Any]) -> tuple[str, int, str]:
    """The key under which there is one validation."""
    return str(line["compile"]), int(line["step"]), str(line["name"])


def read(path: Path) -> list[dict[str, Any]]:
    """Every whole line, in order; torn or damaged ones are left out."""
    try:
        texts = path.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    return [line for text in texts if (line := _parsed(text)) is not None]


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
        key_of(line)
        float(line["score"])
    except (ValueError, TypeError, KeyError, OverflowError):
        return None
    return line
