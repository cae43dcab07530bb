"""Engines as the gateway's parts see them, without HTTP: adapters by name, their bytes read when loaded.

For a state machine of the served versions; pretend_engine.py is one behind real HTTP. Their scores are what
the probe of the loaded checkpoint says, so a publication of that checkpoint is proven and of another is not.
"""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from runtime.gateway.engines.engine_client import (
    AdapterReport,
    EngineClient,
    EngineError,
    EngineUnreachableError,
)
from runtime.gateway.engines.prefix_cache import NO_CACHE_USE, CacheUse
from runtime.shared.checkpoint import ADAPTER_WEIGHTS, Checkpoint, CheckpointStore
from runtime.shared.probe_file import PROBE_FILE

_TOKENS, _PROMPT = 4, 2
_BASE = np.linspace(-3.0, -1.0, _TOKENS, dtype=np.float32)
_MODULES = 14
_CONTEXT = 512
_ANSWER_TIMES = 9
NO_WEIGHTS = ""  # of the base model


def commit(store: CheckpointStore, version: int, seed: int) -> Checkpoint:
    """The checkpoint of a version, with weights that no other seed gives."""

    def write(folder: Path) -> None:
        (folder / ADAPTER_WEIGHTS).parent.mkdir()
        (folder / ADAPTER_WEIGHTS).write_bytes(f"weights {version} of {seed}".encode())
        probe = {
            "tokens": np.arange(3, 3 + _TOKENS),
            "offsets": np.array([0, _TOKENS]),
            "sampled": (np.arange(_TOKENS) >= _PROMPT).astype(np.uint8),
            "logprobs_policy": _BASE + np.float32(0.1 * version + seed),
            "logprobs_base": _BASE,
        }
        save_file(probe, folder / PROBE_FILE)

    return store.commit(version, version, {"counts": {}}, write)


class PlayedEngine(EngineClient):
    """One engine. `weights`: by an adapter's name, the hash of what was loaded; a restart empties it.

    `off`: how far its scores are from the trainer's; `seconds`: how long each of its answers takes.
    """

    def __init__(self, name: str) -> None:
        super().__init__(Path(f"{name}.sock"))
        self.weights: dict[str, str] = {}
        self.lives = 0
        self.is_up, self.off, self.seconds = True, 0.0, 0.0
        self._scores: dict[str, Any] = {}

    def restart(self) -> None:
        """Another process, with nothing loaded."""
        self.weights, self.lives = {}, self.lives + 1

    async def answer(self, name: str) -> str | None:
        """The hash of the weights that answer a request for a model's name; None: it has no such."""
        life, found = self.lives, self.weights.get(name)
        for _ in range(_ANSWER_TIMES):
            await self._take_time()
        is_kept = found is None or self.lives != life or self.weights.get(name) == found
        assert is_kept, f"{name} was unloaded in use"
        return NO_WEIGHTS if name == "base" else found

    async def health(self) -> bool:
        """See EngineClient, as for all that follow."""
        return self.is_up

    async def cache_use(self) -> CacheUse:
        """None."""
        return NO_CACHE_USE

    async def load_adapter(self, name: str, path: Path) -> None:
        """Read from the folder now."""
        await self._take_time()
        if name in self.weights:
            raise EngineError(self.name, 400, "it is loaded already")
        try:
            content = (path.parent / ADAPTER_WEIGHTS).read_bytes()
            self._scores[name] = load_file(path.parent / PROBE_FILE)["logprobs_policy"]
        except OSError as error:
            raise EngineError(self.name, 400, str(error)) from error
        self.weights[name] = hashlib.sha256(content).hexdigest()

    async def unload_adapter(self, name: str) -> None:
        """No request gets it from now on."""
        await self._take_time()
        if self.weights.pop(name, None) is None:
            raise EngineError(self.name, 404, "it is not loaded")

    async def verify_adapter(self, name: str, path: Path) -> AdapterReport:
        """Of the loaded bytes and the file's."""
        await self._take_time()
        try:
            file = hashlib.sha256((path.parent / ADAPTER_WEIGHTS).read_bytes()).hexdigest()
        except OSError as error:
            raise EngineError(self.name, 500, str(error)) from error
        same = self.weights.get(name) == file
        return AdapterReport(_MODULES if name in self.weights else 0, _MODULES, () if same else ("a",), file)

    async def score(self, model: str, token_ids: list[int]) -> list[float]:
        """By the probe that was read with the adapter."""
        await self._take_time()
        return self._logprobs(model)[: len(token_ids)]

    async def score_next(self, model: str, token_ids: list[int], token: int) -> float:
        """The same."""
        await self._take_time()
        return self._logprobs(model)[len(token_ids)]

    async def _json(self, method: str, path: str, body: object = None) -> Any:
        """The list of its models, which is all that is left to be asked over HTTP."""
        assert path == "/v1/models"
        await self._take_time()
        return {"data": [{"id": name, "max_model_len": _CONTEXT} for name in ("base", *self.weights)]}

    def _logprobs(self, model: str) -> list[float]:
        if model != "base" and model not in self.weights:
            raise EngineError(self.name, 404, "no such model")
        return (_BASE if model == "base" else self._scores[model] + np.float32(self.off)).tolist()

    async def _take_time(self) -> None:
        life = self.lives
        await asyncio.sleep(self.seconds)
        if not self.is_up or self.lives != life:
            raise EngineUnreachableError(self.name, "its process is gone")
