"""An Arbor client and everything behind its wire, played: for tests of jobs, rounds, ids and what goes wrong.

The gateway is the real one; the engine's answers are made up (pretend_engine.py), and a trainer of ours
commits a checkpoint for each batch it is given, at once. What the real client makes of the real runtime is in
tests/e2e/test_arbor_client.py.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from safetensors.numpy import save_file

from runtime.shared import failpoints
from runtime.shared.batch import read_batch
from runtime.shared.checkpoint import CheckpointStore, checkpoint_name
from runtime.shared.files import write_json
from tests.runtime.gateway_process import Gateway
from tests.runtime.pretend_engine import PretendEngine
from tests.support.waiting import wait_until

TOKENS, PROMPT = 12, 4
GENERATIONS = 2
_SOON_SECONDS = 0.02

Group = list[dict[str, Any]]


class Trainer:
    """Takes the batches of a run's folder. `fails`: why it trains none; `held`: it has not begun yet."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.fails: str | None = None
        self.go = threading.Event()
        self.go.set()
        # The samples of each step, by their ids.
        self.trained: dict[int, list[str]] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self.go.set()
        self._thread.join(30)

    def _run(self) -> None:
        while not self._over.wait(_SOON_SECONDS):
            store = CheckpointStore(self._folder / "checkpoints")
            done = {*store.names()}
            for path in sorted((self._folder / "steps").glob("[0-9]*")):
                number = int(path.name)
                if checkpoint_name(number) not in done and not (path / "failed.json").exists():
                    self.go.wait()
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


class Wire:
    """A run with its gateway, and a client of it that speaks as Arbor's do."""

    def __init__(self, folder: Path, engine: type[PretendEngine] = PretendEngine, **settings: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.armed = folder / "armed"
        os.environ[failpoints.VARIABLE] = f"file:{self.armed}"
        self._sockets = Path(tempfile.mkdtemp(prefix="slip-"))
        self.engine = engine(self._sockets / "e.sock")
        self.trainer = Trainer(folder)
        self.gateway = Gateway(folder, self.engine.socket, folder, **settings)
        del os.environ[failpoints.VARIABLE]
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

    # ------------------------------------------------------------------ what a client does

    def post(self, route: str, prefix: str = "/v1/fine_tuning/grpo", **body: Any) -> httpx.Response:
        return self.gateway.http.post(f"{prefix}/{route}", json=body)

    def ask(self, route: str, **body: Any) -> dict[str, Any]:
        """An answer that is one."""
        answer = self.post(route, **body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def refused(self, route: str, **body: Any) -> tuple[int, str, str]:
        """The status, the code and the words of an error, which is what such a client raises."""
        answer = self.post(route, **body)
        error = answer.json()["error"]
        return answer.status_code, error["code"], error["message"]

    def begin(self, **config: Any) -> dict[str, Any]:
        config = {"num_generations": GENERATIONS, **config}
        return self.ask("initialize", model=self.gateway.name, trainer_config=config)

    def pending(self, job: str) -> list[int]:
        """The ids to send groups under: asked for until there are some, as these clients do."""
        return wait_until(lambda: self.ask("status", job_id=job)["pending_batch_ids"])

    def group(self, text: str, model: str = "policy", size: int = GENERATIONS) -> Group:
        """What was just sampled for a question, and its rewards."""
        messages = [{"role": "user", "content": text}]
        members = []
        for number in range(size):
            answer = self.gateway.chat(model=f"openai/arbor:{model}", messages=messages)
            assert answer.status_code == 200, answer.text
            said = answer.json()["choices"][0]["message"]["content"]
            completion = {"role": "assistant", "content": said}
            members.append({"messages": messages, "completion": completion, "reward": float(number)})
        return members

    def send(self, job: str, batch_id: int, group: Any, **more: Any) -> dict[str, Any]:
        return self.ask("step", job_id=job, model="x", batch=group, batch_id=batch_id, **more)

    def round(self, job: str, groups: Sequence[Group], model: str = "policy") -> dict[str, Any]:
        """All of a client's round: each group under as many ids as there are for it; the last answer."""
        ids = self.pending(job)
        answers = [self.send(job, one, groups[place % len(groups)]) for place, one in enumerate(ids)]
        return answers[-1]

    # ------------------------------------------------------------------ what became of it

    def settled(self, job: str) -> dict[str, Any]:
        """The job's word once nothing of it is left to train."""
        self.pending(job)
        return self.ask("status", job_id=job)

    @property
    def trained(self) -> list[str]:
        """Every sample a step had, in order."""
        return [sample for _, samples in sorted(self.trainer.trained.items()) for sample in samples]


@contextmanager
def wires(folder: Path) -> Iterator[Callable[..., Wire]]:
    """Makes wires; what is left of them is closed at the end."""
    made: list[Wire] = []

    def make(name: str = "run", **settings: Any) -> Wire:
        made.append(Wire(folder / name, **settings))
        return made[-1]

    try:
        yield make
    finally:
        for wire in made:
            wire.close()
