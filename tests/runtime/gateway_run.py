"""A run whose gateway is the real one, in a process of its own, and whose engine and trainer are played.

The engine's answers are made up (pretend_engine.py), and a trainer of ours commits a checkpoint for each
batch it is given, at once.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from runtime.shared.batch import read_batch
from runtime.shared.checkpoint import CheckpointStore, checkpoint_name
from runtime.shared.json_files import write_json
from tests.runtime.gateway_process import Gateway
from tests.runtime.pretend_engine import PretendEngine

TOKENS, PROMPT = 12, 4
_SOON_SECONDS = 0.02


class Trainer:
    """Takes the batches of a run's folder. `fails`: why it trains none."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.fails: str | None = None
        # The samples of each step, by their ids.
        self.trained: dict[int, list[str]] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join(30)

    def _run(self) -> None:
        while not self._over.wait(_SOON_SECONDS):
            store = CheckpointStore(self._folder / "checkpoints")
            done = {*store.names()}
            for path in sorted((self._folder / "steps").glob("[0-9]*")):
                number = int(path.name)
                if checkpoint_name(number) not in done and not (path / "failed.json").exists():
                    self._train(store, number, path)

    def _train(self, store: CheckpointStore, number: int, path: Path) -> None:
        if self.fails is not None:
            write_json(path / "failed.json", {"error": self.fails})
            return
        meta = read_batch(path).meta
        self.trained[number] = [sample["id"] for sample in meta["samples"]]
        state = {"counts": meta["counts"], "key": meta["key"], "metrics": {"loss": 0.5}}
        state |= {name: meta[name] for name in ("client_state", "request_sha256", "kind")}
        store.commit(number, number, state, lambda partial: _write(partial, number))


def _write(partial: Path, version: int) -> None:
    """Weights, and a probe that no other version has."""
    base = np.linspace(-3.0, -1.0, TOKENS, dtype=np.float32)
    (partial / "adapter").mkdir()
    save_file({"a": np.full(8, version, dtype=np.float32)}, partial / "adapter" / "adapter_model.safetensors")
    probe = {
        "tokens": np.arange(3, 3 + TOKENS),
        "offsets": np.array([0, TOKENS]),
        "sampled": (np.arange(TOKENS) >= PROMPT).astype(np.uint8),
        "logprobs_policy": base + np.float32(0.1 * version),
        "logprobs_base": base,
    }
    save_file(probe, partial / "probe.safetensors")


class GatewayRun:
    """The run in a folder."""

    def __init__(self, folder: Path, engine: type[PretendEngine] = PretendEngine, **settings: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._sockets = Path(tempfile.mkdtemp(prefix="slip-"))
        self.engine = engine(self._sockets / "e.sock")
        self.trainer = Trainer(folder)
        self.gateway = Gateway(folder, self.engine.socket, folder, **settings)
        self.gateway.until_ready()

    def close(self) -> None:
        self.gateway.stop()
        self.trainer.close()
        self.engine.close()
        shutil.rmtree(self._sockets, ignore_errors=True)

    def restart(self) -> None:
        """The next life of the gateway, however this one ended."""
        self.gateway.process.wait(60)
        self.gateway.http.close()
        self.gateway.start()
        self.gateway.until_ready()

    @property
    def trained(self) -> list[str]:
        """Every sample a step had, in order."""
        return [sample for _, samples in sorted(self.trainer.trained.items()) for sample in samples]


@contextmanager
def gateway_runs(folder: Path) -> Iterator[Callable[..., GatewayRun]]:
    """Makes runs; what is left of them is closed at the end."""
    made: list[GatewayRun] = []

    def make(name: str = "run", **settings: Any) -> GatewayRun:
        made.append(GatewayRun(folder / name, **settings))
        return made[-1]

    try:
        yield make
    finally:
        for run in made:
            run.close()
