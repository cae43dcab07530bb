"""A run of the real recipe on a model of two layers: started in half a second, killed, looked at.

`Trainers` is one warm server for a test file (trainer_server.py); `Run` is one state folder with its recorded
batches, over any number of lives.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.recipes.command import trainer_command
from runtime.shared.batch import Batch, step_folder, write_batch
from runtime.shared.checkpoint import Checkpoint, CheckpointStore
from runtime.shared.runtime_config import RuntimeConfig
from runtime.shared.train_config import LoraConfig, TrainConfig
from tests.runtime.trainer_fixtures import make_batch, random_samples, tiny_model
from tests.support.waiting import wait_until

REPOSITORY = Path(__file__).resolve().parents[2]
_LIFE_SECONDS = 120.0


class Trainers:
    """The server. One trainer at a time is started, and waited for."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.runtime.trainer_server"],
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def start(self, config: RuntimeConfig, *, follow: bool, failpoint: str = "") -> int:
        """The pid of a trainer that starts now."""
        log = str(Path(config.state_dir) / "trainer.log")
        command = trainer_command(config, follow=follow)
        return self._ask(command=command, log=log, failpoint=failpoint)["pid"]

    def wait(self, pid: int) -> int:
        """Its exit code, negative for a signal; bounded. Every trainer must be waited for once."""
        return wait_until(lambda: self._ask(poll=pid), _LIFE_SECONDS)["exit_code"]

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(120)

    def _ask(self, **ask: Any) -> dict[str, Any]:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(ask) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        assert line, "the trainers' server has ended"
        return json.loads(line)


def recorded(step: int) -> Batch:
    """The batch of a step: always the same one."""
    return make_batch(random_samples(step, groups=3), step=step)


@dataclass
class Run:
    """A run's folder, and what must hold of it at any moment."""

    folder: Path
    trainers: Trainers
    keep: int = 2

    def __post_init__(self) -> None:
        (self.folder / "steps").mkdir(parents=True, exist_ok=True)
        self.store = CheckpointStore(self.folder / "checkpoints")

    @property
    def config(self) -> RuntimeConfig:
        return RuntimeConfig(
            run_id="crash-test",
            model_path=str(tiny_model()),
            state_dir=str(self.folder),
            socket_dir=str(self.folder),
            train=TrainConfig(
                lora=LoraConfig(rank=4, alpha=12),
                learning_rate=1e-3,
                pack_tokens=128,
                keep_checkpoints=self.keep,
            ),
        )

    def record(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            if not step_folder(self.folder / "steps", step).exists():
                write_batch(step_folder(self.folder / "steps", step), recorded(step))

    def start(self, *, follow: bool = False, failpoint: str = "") -> int:
        return self.trainers.start(self.config, follow=follow, failpoint=failpoint)

    def live(self, failpoint: str = "") -> int:
        """One life over the recorded batches; its exit code."""
        return self.trainers.wait(self.start(failpoint=failpoint))

    def kill_after(self, seconds: float, pid: int) -> int:
        """SIGKILL a started trainer at a moment of its life, if it lasts so long; its exit code."""
        end = time.monotonic() + seconds
        descriptor = os.pidfd_open(pid)
        try:
            # Not `wait_until`: the end of the time is what is wanted, and to the millisecond, so that any
            # instant of a life may be hit.
            while time.monotonic() < end and not _ended(pid):
                time.sleep(min(0.001, max(0.0, end - time.monotonic())))
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)
        return self.trainers.wait(pid)

    def said(self) -> dict[str, Any]:
        """trainer.json; empty before the trainer's first word."""
        try:
            return json.loads((self.folder / "trainer.json").read_text())
        except FileNotFoundError:
            return {}

    @property
    def log(self) -> str:
        return (self.folder / "trainer.log").read_text()[-3000:]

    @property
    def step(self) -> int:
        """Of the newest whole checkpoint; 0 before the first. Two must be kept, all whole."""
        checkpoints = [self.store.load(name) for name in self.store.names()]
        step = checkpoints[-1].step if checkpoints else 0
        assert len(checkpoints) >= min(step, 2), f"{len(checkpoints)} checkpoints kept at step {step}"
        return step

    @property
    def newest(self) -> Checkpoint:
        found = self.store.newest()
        assert found is not None, self.log
        return found

    @property
    def logged(self) -> list[int]:
        """The steps of metrics.jsonl, in order."""
        return [json.loads(line)["step"] for line in (self.folder / "metrics.jsonl").open()]


def same_tensors(found: Checkpoint, expected: Checkpoint) -> bool:
    """Whether adapter, optimizer, random state and probe are the same bytes, and the counters equal."""
    described = [
        {name: file for name, file in one.manifest["files"].items() if name.endswith(".safetensors")}
        for one in (found, expected)
    ]
    return described[0] == described[1] and found.state["counters"] == expected.state["counters"]


def _ended(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] == b"Z"
    except FileNotFoundError:
        return True
