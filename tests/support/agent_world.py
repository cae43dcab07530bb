"""A run whose engine is scripted and calls tools, a relay in front of it, and the programs that use it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from tests.support.environment import PROGRAMS, REPOSITORY, runtime_environ, runtime_python
from tests.support.foreign_environments import python_with
from tests.support.relay_process import RelayProcess

TOKEN = "token-of-the-tests"
_SECONDS = 300


@dataclass(frozen=True)
class Heard:
    """What the engine was asked once, and what it sampled."""

    asked: dict[str, Any]
    prompt: list[int]
    ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class Sequence:
    """A row of a step's tensors: all its ids, and those of them that were sampled."""

    rollout: str
    tokens: list[int]
    sampled: list[int]
    logprobs: list[float]


class AgentWorld:
    """Its folder is the run's state."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "run"
        self._process = subprocess.Popen(
            [runtime_python(), PROGRAMS / "runtime" / "agent_world.py", self.folder],
            env=runtime_environ(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout
        socket = self._process.stdout.readline().strip()
        assert socket, "the world has ended"
        self._relay = RelayProcess(Path(socket), TOKEN, folder / "relay.log")

    def close(self) -> None:
        self._relay.stop()
        self._process.communicate(timeout=60)

    def said_by(self, requirements: tuple[str, ...], program: str, *words: str) -> dict[str, Any]:
        """What a program prints last, which runs where these are installed and our own package is not."""
        return said_by(requirements, program, *words, base_url=f"{self._relay.url}/v1", api_key=TOKEN)

    def heard(self, program: str) -> dict[int, list[Heard]]:
        """What the engine was asked by a program, by the number that its questions have after its name."""
        found: dict[int, list[Heard]] = {}
        for line in map(json.loads, (self.folder / "heard.jsonl").open()):
            (question,) = [it["content"] for it in line["asked"]["messages"] if it["role"] == "user"]
            name, number = question.partition(":")[0].split(" ")
            if name == program:
                found.setdefault(int(number), []).append(Heard(**line))
        return found

    def trained(self, rollouts: set[str]) -> Iterator[Sequence]:
        """The rows of the steps' tensors that are of these rollouts."""
        for path in sorted(self.folder.glob("steps/[0-9]*/batch.json")):
            arrays, meta = load_file(path.with_name("batch.safetensors")), json.loads(path.read_text())
            for row, sample in enumerate(meta["samples"]):
                if sample["rollout"] in rollouts:
                    span = slice(*arrays["offsets"][row : row + 2])
                    flags = arrays["sampled"][span].astype(bool)
                    yield Sequence(
                        sample["rollout"],
                        arrays["tokens"][span].tolist(),
                        arrays["tokens"][span][flags].tolist(),
                        arrays["logprobs"][span][flags].tolist(),
                    )


def said_by(
    requirements: tuple[str, ...], program: str, *words: str, base_url: str, api_key: str
) -> dict[str, Any]:
    """The same, of any run."""
    environ = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "LAUNCH_BASE_URL": base_url,
        "LAUNCH_API_KEY": api_key,
    }
    environ.pop("VIRTUAL_ENV", None)
    done = subprocess.run(
        [python_with(requirements), PROGRAMS / "foreign" / program, *words],
        env=environ, capture_output=True, text=True, timeout=_SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])
