"""The log of one side of a bench: one JSON object a line, with times. `launch bench` reads it at the end.

Neighbours: both programs write it, `launcher/bench/side_run.py` reads. Standard library only, and nothing of
`launcher`: the other trainer's environment has neither.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class SideLog:
    """Spans (name, start, end) and steps."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, kind: str, **fields: Any) -> None:
        """One line."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, "time": time.time(), **fields}) + "\n")

    @contextlib.contextmanager
    def span(self, kind: str) -> Iterator[dict[str, Any]]:
        """A span of time; the yielded dict's content is added to its line."""
        began = time.time()
        told: dict[str, Any] = {}
        yield told
        self.write(kind, began=began, **told)
