"""The served policy versions: the alias's version, and the versions in use.

Neighbours: proxy.py resolves a model name when a request comes and holds its version until the answer;
version_check.py stages versions and unloads unused ones; reload.py reloads a version that a request names.
`serving.json` is the alias: one write moves it.

`policy@v12` is a version by its number, `policy@v12+3f2a9c1b4d5e` the same with the beginning of its weights'
hash. After the loss of a machine numbers are given a second time: then the number alone is refused (C55). The
name of the run's own model is the policy's too, in each of these forms, and so is a client's own name for it
(`also`); `policy@12` is `policy@v12`.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.gateway.http.openai_errors import ApiError, gone_model, not_ready, reused_model, unknown_model
from runtime.shared import json_files
from runtime.shared.checkpoint import CheckpointError, CheckpointStore, checkpoint_name
from runtime.shared.model_names import ModelNames

BASE = "base"
_PREFIXES = ("openai/", "arbor:")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")
_NAMED = re.compile(rf"v?({_NUMBER.pattern})(?:\+([0-9a-f]{{8,64}}))?")
# Of a hash, in a name.
_DIGITS = 12
# Versions loaded again because a request named them, beside those that training keeps loaded: with these they
# still fit into an engine's memory for adapters, four for each of its places.
MAX_RELOADED = 8


@dataclass(frozen=True)
class Served:
    """A version, the name it has for clients, and the engine's name for it (version 0 has no adapter)."""

    version: int
    name: str
    engine_model: str


def kept_versions(checkpoints: CheckpointStore) -> dict[int, int]:
    """Versions whose weights are on disk, and when each was committed in unix seconds: by name, unread."""
    kept: dict[int, int] = {}
    for name in checkpoints.names():
        number = name.removeprefix("step-").lstrip("0")
        with contextlib.suppress(FileNotFoundError):  # pruned at this moment
            if _NUMBER.fullmatch(number):
                kept[int(number)] = int((checkpoints.root / name).stat().st_mtime)
    return kept


def weights_of(checkpoints: CheckpointStore, version: int) -> str | None:
    """The hash of a version's weights, by its checkpoint's manifest; None if it is not kept."""
    try:
        return checkpoints.load(checkpoint_name(version), verify=False).adapter_sha256
    except CheckpointError:
        return None


class Versions:
    """The alias and the versions behind it. The gateway's event loop is its only user."""

    def __init__(
        self,
        path: Path,
        served_name: str,
        keep: int,
        kept: Callable[[], dict[int, int]] = dict,
        weights: Callable[[int], str | None] = lambda _: None,
        reused_after: int | None = None,
        names: ModelNames | None = None,
    ) -> None:
        """`keep`: how many adapters stay loaded for requests that name them; `kept`: see `kept_versions`.

        `weights`: see `weights_of`; `reused_after`: see `Rewind`; `names`: of the model that is trained.
        """
        self._path = path
        self._keep = keep
        self._kept = kept
        self._weights_of = weights
        self._reused_after = reused_after
        # By version: the weights that this machine has served under a number; it never serves others under
        # it.
        self._weights: dict[int, str] = {}
        self._alias = served_name
        self._names_of_model = names
        # Further names of a version: the name here for a client's name, None for an unknown one.
        self.also: Callable[[str], str | None] = lambda _: None
        self._held: Counter[int] = Counter()
        self._began = int(time.time())
        saved = json_files.read_json(path) or {}
        self.current: int = saved.get("version", 0)
        self.step: int = saved.get("step", 0)
        self.staged: set[int] = {0, self.current}
        # Those of them that were loaded again, the one named least recently first.
        self._recalled: OrderedDict[int, None] = OrderedDict()

    def named(self, version: int) -> str:
        """`policy@v12`: never reused for other weights."""
        return f"{self._alias}@v{version}"

    def checkpoint(self, name: str) -> str:
        """The checkpoint that has the weights of `policy@v12`; any other name is a checkpoint's own.

        Raises ApiError(409) if the name may mean other weights.
        """
        version, weights = self._parsed(self._plain(name))
        if not version:
            return name
        self._check_weights(name, version, weights)
        return checkpoint_name(version)

    @property
    def newest(self) -> Served:
        """The version that the alias means now."""
        return self._served(self.current)

    def resolve(self, model: str) -> Served:
        """The version that a client's model name means now: a named version is that one or an error (C55).

        Raises ApiError, 404 or 409. The version may have to be loaded first: `is_loaded`.
        """
        name = self._plain(model)
        if name == BASE:
            return Served(0, BASE, BASE)
        if self._is_policy(name):
            return self.newest
        version, weights = self._parsed(name)
        if version is None or version > self.current:
            trained = None if self._names_of_model is None else self._names_of_model.own
            raise unknown_model(model, self._alias, trained)
        if version not in self.staged and version not in self._kept():
            raise self.gone(version, "was served once, but its weights are no longer kept")
        self._check_weights(name, version, weights)
        if version in self._recalled:
            self._recalled.move_to_end(version)
        return self._served(version)

    def is_loaded(self, version: int) -> bool:
        """Whether the engines have it."""
        return version in self.staged

    def is_reused(self, version: int) -> bool:
        """Whether a lost machine may have given out the number, for other weights."""
        return self._reused_after is not None and version > self._reused_after

    def acquire(self, version: int) -> None:
        """A request uses the version: it stays loaded until as many `release`s."""
        self._held[version] += 1

    def release(self, version: int) -> None:
        """The request has ended."""
        self._held[version] -= 1

    def retire(self, version: int) -> bool:
        """Whether the version may be unloaded; if so, a request that names it must reload it (C35)."""
        recent = sorted(self.staged - {0})[-self._keep :]
        if version == self.current or version in recent or self._held[version] > 0:
            return False
        if version in self._recalled:
            return False
        self.staged.discard(version)
        return True

    def make_room(self) -> int | None:
        """The version to unload before another is loaded again; None if there is room.

        Of those no request uses, the one named least recently. Raises ApiError(503) when all are in use.
        """
        if len(self._recalled) < MAX_RELOADED:
            return None
        for version in self._recalled:
            if not self._held[version]:
                self.forget(version)
                return version
        message = f"{MAX_RELOADED} older versions are in use now, and there is no room for more"
        raise not_ready(message, 1)

    def mark_reloaded(self, version: int) -> None:
        """The engines have it again."""
        self.staged.add(version)
        self._recalled[version] = None

    def forget(self, version: int) -> None:
        """The engines have it no longer."""
        self.staged.discard(version)
        self._recalled.pop(version, None)

    def move(self, version: int, step: int) -> None:
        """Serve `version` under the alias from now on: the one write."""
        json_files.write_json(
            self._path, {"version": version, "step": step, "name": self.named(version)}, durable=True
        )
        self.current, self.step = version, step
        self.staged.add(version)

    def gone(self, version: int, why: str) -> ApiError:
        """The error for a version that was served and cannot be again; it names those that can."""
        name = self.named(version)
        names = self._names(self._kept())
        return gone_model(name, why, [other for other, its in names.items() if its != version])

    def models(self) -> dict[str, Any]:
        """The body of `GET /v1/models`: the alias, the versions that answer by name, the base."""
        kept = self._kept()
        names = self._names(kept).items()
        return {"object": "list", "data": [self._model(name, version, kept) for name, version in names]}

    def model(self, name: str) -> dict[str, Any]:
        """The body of `GET /v1/models/NAME`. Raises ApiError(404)."""
        return self._model(name, self.resolve(name).version, self._kept())

    def _names(self, kept: dict[int, int]) -> dict[str, int]:
        """Every name that answers, the newest version first."""
        versions = self.staged | {version for version in kept if version <= self.current}
        was_requested = {self._name_now(version): version for version in sorted(versions, reverse=True)}
        return {self._alias: self.current} | was_requested | {BASE: 0}

    # ------------------------------------------------------------------ which weights a name means

    def _plain(self, model: str) -> str:
        """A client's name without a server's prefix, or the name here that it stands for."""
        name = model
        for prefix in _PREFIXES:
            name = name.removeprefix(prefix)
        if meant := self.also(name):
            return meant
        called, at, version = name.rpartition("@")
        is_policy = bool(at) and self.also(called) == self._alias
        return f"{self._alias}@{version}" if is_policy else name

    def _is_policy(self, name: str) -> bool:
        return name == self._alias or (self._names_of_model is not None and self._names_of_model.has(name))

    def _parsed(self, name: str) -> tuple[int | None, str | None]:
        """The version in a name, whether or not there is such a version, and the hash in it, if any."""
        alias, _, rest = name.rpartition("@")
        found = _NAMED.fullmatch(rest) if self._is_policy(alias) else None
        return (int(found[1]), found[2]) if found else (None, None)

    def _check_weights(self, name: str, version: int, weights: str | None) -> None:
        """Raise ApiError(409) unless the name can only ever have meant the weights it means now."""
        own = self._sha256(version)
        if (weights is None and self.is_reused(version)) or (
            weights is not None and not (own or "").startswith(weights)
        ):
            raise reused_model(name, self._reused_after, own and self._full_name(version, own))

    def _name_now(self, version: int) -> str:
        """The shortest name that means these weights alone."""
        own = self._sha256(version) if self.is_reused(version) else None
        return self._full_name(version, own) if own else self.named(version)

    def _full_name(self, version: int, sha256: str) -> str:
        return f"{self.named(version)}+{sha256[:_DIGITS]}"

    def _sha256(self, version: int) -> str | None:
        if version not in self._weights and (found := self._weights_of(version)) is not None:
            self._weights[version] = found
        return self._weights.get(version)

    def _model(self, name: str, version: int, kept: dict[int, int]) -> dict[str, Any]:
        created = kept.get(version, self._began)
        return {"id": name, "object": "model", "created": created, "owned_by": "slipway"}

    def _served(self, version: int) -> Served:
        name = self.named(version)
        return Served(version, name, BASE if version == 0 else name)
