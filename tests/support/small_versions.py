"""The versions a small run has served: their numbers, weights and names, and what is kept of them.

Neighbours: `small_run.py` takes the steps that make them.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from typing import Any

from runtime.shared.schema import RestoreRequest
from tests.support.small_door import error


@dataclass
class SmallVersions:
    """A version has the number of the step that made it. Look at `restored`, `pinned`, `named`."""

    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    pinned: list[str] = field(default_factory=list)
    # Pinned by a version's name, by what was compiled to it.
    named: list[str] = field(default_factory=list)
    # The checkpoint that was named best last, and whose.
    best: tuple[str, str] | None = None
    restored: list[str] = field(default_factory=list)
    # By version, the hash of its weights: those of a machine that was lost are never made again.
    weights: dict[int, str] = field(default_factory=dict)
    machine: int = 1
    # Versions after it were counted again, since a machine was lost: their numbers alone say nothing.
    reused_after: int | None = None
    # Whether what was trained is gone by the time that somebody asks for it to be kept.
    prunes: bool = False
    # What goes for what is pinned next.
    lets_go: list[str] = field(default_factory=list)
    version: int = 0
    client_state: dict[str, Any] | None = None
    # Which version it claims to have answered with, whatever was asked; None: the one that was named.
    claims: int | None = None

    def name_of(self, version: int) -> str:
        """The name that means this version's weights alone."""
        return f"policy@v{version}+{self.weights[version][:12]}"

    def version_of(self, model: str) -> int | None:
        """The version that answers to a name: `policy` is the newest, `base` the model before training.

        None where the name has the hash of other weights, or needs one and has none.
        """
        if self.claims is not None:
            return self.claims
        named = re.search(r"@v(\d+)(?:\+(\w+))?$", model)
        if named is None:
            return 0 if model == "base" else self.version
        version = int(named[1])
        if named[2] is None and self.reused_after is not None and version > self.reused_after:
            return None
        return version if self.weights.get(version, "").startswith(named[2] or "") else None

    def pin(self, name: str) -> tuple[int, Any]:
        version = self.version_of(name) if "@v" in name else int(name.removeprefix("step-"))
        if version is None:
            return error(409, "different weights", "version_reused")
        if version not in self.steps or self.prunes:
            return error(404, f"there is no checkpoint {name!r}", "not_found")
        (kept,) = [it for it in self.checkpoints() if it["version"] == version]
        (self.named if "@v" in name else self.pinned).append(kept["name"])
        return 200, kept | {"pinned": True, "let_go": self.lets_go}

    def restore(self, name: str, request: RestoreRequest) -> tuple[int, dict[str, Any]]:
        if self.prunes:
            return error(404, f"there is no checkpoint {name!r}", "not_found")
        self.restored.append(name)
        self.client_state = request.client_state
        number = self.next_step()
        self.steps[number] |= {"key": request.key}
        return 202, self.steps[number]

    def next_step(self) -> int:
        """Its number and its version's, which is served at once."""
        number = max(self.steps, default=0) + 1
        self.version = number
        self.weights[number] = hashlib.sha256(f"{self.machine}/{number}".encode()).hexdigest()
        self.steps[number] = {
            "id": number, "key": "", "state": "published", "version": number,
            "publication": {"sha256": self.weights[number]},
        }  # fmt: skip
        return number

    def checkpoints(self) -> list[dict[str, Any]]:
        return [
            {
                "name": f"step-{number:06d}",
                "step": number,
                "version": number,
                "created": 0.0,
                "bytes": 1,
                "weights": self.weights.get(number, ""),
            }
            for number in self.steps
        ]
