"""The models of ART's clients: the one name that the policy has for them, and how each has done so far.

    art/models.json                       which name is the policy's
    art/history/3f2a9c11d0.jsonl          a line for what was logged of a model at a step

A run trains one policy, so one trainable name is its own: a second one would be the same weights under
another name, and is refused. Any other model is compared with: it is logged and nothing more. Neighbours:
routes.py answers clients with it, training.py trains. Knows nothing of HTTP.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from runtime.gateway.art.bodies import Model
from runtime.gateway.http.openai_errors import ApiError
from runtime.gateway.versions.versions import BASE, Versions
from runtime.shared import files
from runtime.shared.metrics import read_lines
from runtime.shared.model_names import ModelNames

_STEP = re.compile(r"0|[1-9][0-9]{0,8}")
# Of a model's history: more than any training has steps.
MOST_LINES = 20_000


class Models:
    """The names, and the histories. The gateway's event loop is its only user."""

    def __init__(self, root: Path, versions: Versions, alias: str, names: ModelNames) -> None:
        self._root = root
        self._versions = versions
        self._alias = alias
        self._names = names
        self._own: str | None = (files.read_json(root / "models.json") or {}).get("policy")
        self._lines: dict[str, list[dict[str, Any]]] = {}

    def named(self, name: str) -> str | None:
        """The policy's name for what a client's name means, `agent` or `agent@7`; None for any other."""
        model, at, step = name.partition("@")
        if model != self._own:
            return None
        if not at:
            return self._alias
        return self._versions.named(int(step)) if _STEP.fullmatch(step) else None

    def register(self, model: Model) -> None:
        """Know a model. Raises ApiError for one that this run cannot be, OSError."""
        if not model.trainable:
            return
        if model.base_model is None or not self._names.has(model.base_model):
            raise ApiError(
                400,
                f"this run trains {self._names.own}, not {model.base_model}: "
                f"launch --art --model {model.base_model} begins one that does",
                param="base_model",
                code="another_model",
            )
        if model.name == self._own:
            return
        if self._own is not None:
            raise ApiError(
                409,
                f"this run trains one policy, which is {self._own}: use that name to go on, "
                f"or begin another run for {model.name}",
                param="name",
                code="another_policy",
            )
        if model.name == BASE:
            raise ApiError(400, f"{model.name} means something else here: another name", param="name")
        self._root.mkdir(parents=True, exist_ok=True)
        files.write_json(self._root / "models.json", {"policy": model.name}, durable=True)
        self._own = model.name

    def log(self, model: Model, split: str, means: Mapping[str, float]) -> None:
        """Keep what was measured of a model now, under ART's own keys: `val/reward`. Raises OSError."""
        lines = self._history(model.name)
        if len(lines) >= MOST_LINES:
            return
        line = {"step": self._versions.current if model.trainable else 0}
        line |= {f"{split}/{name}": value for name, value in means.items()}
        path = self._path(model.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        files.append_line(path, line)
        lines.append(line)

    def best(self, model: Model, metric: str) -> int | None:
        """The step whose `metric` was highest on average, the later of two; None where none was logged."""
        found: defaultdict[int, list[float]] = defaultdict(list)
        for line in self._history(model.name):
            if isinstance(line.get(metric), (int, float)):
                found[int(line["step"])].append(float(line[metric]))
        return max(found, key=lambda step: (mean(found[step]), step), default=None)

    def _history(self, name: str) -> list[dict[str, Any]]:
        if name not in self._lines:
            lines = read_lines(self._path(name))
            self._lines[name] = [line for line in lines if isinstance(line.get("step"), int)]
        return self._lines[name]

    def _path(self, name: str) -> Path:
        return self._root / "history" / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.jsonl"
