"""A LoRA adapter that a run starts from, as its folder describes it.

Neighbours: `models/adapter_folder.py` reads one, `settings.py` carries it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter. `base`: the value for `--model`: a hub name, `tiny` or an absolute folder. `config`:
    its adapter_config.json.

    `target_modules`: empty if it does not list them.
    """

    folder: Path
    base: str
    rank: int
    alpha: float
    use_rslora: bool
    target_modules: tuple[str, ...]
    config: Mapping[str, Any]


@dataclass(frozen=True)
class InitialAdapter:
    """The adapter that a run trains on, as its plan shows it."""

    folder: str
    rank: int

    def describe(self) -> str:
        """For people: "the adapter /home/me/adapter, rank 16"."""
        return f"the adapter {self.folder}, rank {self.rank}"
