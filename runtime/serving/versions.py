"""Which policy versions are served, which one the alias means, and which are in use at this moment.

Neighbours: proxy.py resolves a model name at admission and holds its version until the answer; publication.py
stages versions and unloads those nobody holds. `serving.json` is the alias: one write moves it.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from runtime import files
from runtime.serving.openai_errors import unknown_model

BASE = "base"
_PREFIXES = ("openai/", "arbor:")


@dataclass(frozen=True)
class Served:
    """A version, the name it has for clients, and the engine's name for it (version 0 has no adapter)."""

    version: int
    name: str
    engine_model: str


class Versions:
    """The alias and the versions behind it. The gateway's event loop is its only user."""

    def __init__(self, path: Path, served_name: str, keep: int) -> None:
        """`keep`: how many adapters stay loaded for requests that name them."""
        self._path = path
        self._keep = keep
        self._alias = served_name
        self._held: Counter[int] = Counter()
        said = files.read_json(path) or {}
        self.current: int = said.get("version", 0)
        self.step: int = said.get("step", 0)
        self.staged: set[int] = {0, self.current}

    def named(self, version: int) -> str:
        """`policy@v12`: never reused for other weights."""
        return f"{self._alias}@v{version}"

    def resolve(self, model: str) -> Served:
        """What a client's model name means now. Raises ApiError(404)."""
        name = model
        for prefix in _PREFIXES:
            name = name.removeprefix(prefix)
        if name == BASE:
            return Served(0, BASE, BASE)
        if name == self._alias:
            return self._served(self.current)
        version = next((version for version in self.staged if self.named(version) == name), None)
        if version is None:
            raise unknown_model(model)
        return self._served(version)

    def acquire(self, version: int) -> None:
        """A request uses the version: it stays loaded until as many `release`s."""
        self._held[version] += 1

    def release(self, version: int) -> None:
        """The request has ended."""
        self._held[version] -= 1

    def retire(self, version: int) -> bool:
        """Whether the version may be unloaded; if so, no request gets it from now on (C35)."""
        recent = sorted(self.staged - {0})[-self._keep :]
        if version == self.current or version in recent or self._held[version] > 0:
            return False
        self.staged.discard(version)
        return True

    def move(self, version: int, step: int) -> None:
        """Serve `version` under the alias from now on: the one write."""
        files.write_json(
            self._path, {"version": version, "step": step, "name": self.named(version)}, durable=True
        )
        self.current, self.step = version, step
        self.staged.add(version)

    def models(self) -> bytes:
        """The body of `GET /v1/models`: the alias, the versions behind it, the base."""
        names = [self._alias, *(self.named(version) for version in sorted(self.staged, reverse=True)), BASE]
        data = [{"id": name, "object": "model", "created": 0, "owned_by": "slipway"} for name in names]
        return json.dumps({"object": "list", "data": data}).encode()

    def _served(self, version: int) -> Served:
        name = self.named(version)
        return Served(version, name, BASE if version == 0 else name)
