"""A gateway in a process of its own, in front of an engine's socket, as the supervisor would start it.

No trainer is beside it to leave a trial: its folder says that the model was admitted earlier, unless a test
takes that away.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx

from runtime.shared import parity_check
from runtime.shared.processes import preexec
from runtime.shared.runtime_config import RuntimeConfig
from tests.support.waiting import wait_until

TOKEN = "token-of-the-tests"
MESSAGES = [{"role": "user", "content": "[[ ## english ## ]]\nthe black cat"}]


def say_admitted(config: RuntimeConfig) -> None:
    """Leave in the run's folder what an admission that passed leaves."""
    said = {"admitted": True, "subject": parity_check.fingerprint(config), "model": config.model_path}
    (Path(config.state_dir) / parity_check.RECORD).write_text(json.dumps(said))


class Gateway:
    """One gateway over `folder`; `engine` None: it finds none; `admitted`: in an earlier life of it."""

    def __init__(
        self, folder: Path, engine: Path | None, model: Path, /, *, admitted: bool = True, **settings: Any
    ) -> None:
        self.folder = folder
        self._sockets = Path(tempfile.mkdtemp(prefix="slip-"))
        self._model = model
        self._settings = settings
        if engine is not None:
            self.point_to(engine)
        if admitted:
            say_admitted(RuntimeConfig.model_validate(self.config))
        self.start()

    def point_to(self, engine: Path, index: int = 0) -> None:
        """Make `engine` the one the gateway finds at its place."""
        fresh = self._sockets / "fresh"
        fresh.symlink_to(engine)
        os.replace(fresh, self._sockets / f"engine-{index}.sock")

    @property
    def socket(self) -> Path:
        """Where it listens."""
        return self._sockets / "gateway.sock"

    @property
    def name(self) -> str:
        """The policy's."""
        return self._settings.get("served_name", "policy")

    @property
    def config(self) -> dict[str, Any]:
        return {
            "run_id": "test", "model_path": str(self._model), "state_dir": str(self.folder),
            "socket_dir": str(self._sockets), **self._settings,
        }  # fmt: skip

    def start(self) -> None:
        config = self.folder / "runtime.json"
        config.write_text(json.dumps(self.config))
        with open(self.folder / "gateway.log", "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "runtime.gateway.gateway", "--config", config],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                # A test that breaks before it can stop it, as under a mutation, must not leave it behind.
                preexec_fn=preexec(signal.SIGTERM),
            )
        assert self.process.stdin
        self.process.stdin.write(TOKEN.encode() + b"\n")
        self.process.stdin.close()
        transport = httpx.HTTPTransport(uds=str(self.socket))
        headers = {"Authorization": f"Bearer {TOKEN}"}
        self.http = httpx.Client(transport=transport, base_url="http://x", headers=headers, timeout=600)
        wait_until(self._answers, what=self._said)

    def _answers(self) -> bool:
        assert self.process.poll() is None, self._said()
        try:
            return self.http.get("/healthz").status_code == 200
        except httpx.TransportError:
            return False

    def until_ready(self) -> Gateway:
        wait_until(lambda: self.status()["phase"] == "ready", what=self._said)
        return self

    def _said(self) -> str:
        return (self.folder / "gateway.log").read_text()[-4000:]

    def status(self) -> dict[str, Any]:
        return self.http.get("/slipway/status").json()

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait(60)
        self.http.close()

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(60)
        self.http.close()

    def chat(
        self, rollout: str | None = None, headers: dict[str, str] | None = None, **fields: Any
    ) -> httpx.Response:
        """One chat completion."""
        prefix = "" if rollout is None else f"/rollouts/{rollout}"
        body = {"model": self.name, "messages": MESSAGES, "max_tokens": 8, **fields}
        return self.http.post(f"{prefix}/v1/chat/completions", json=body, headers=headers)

    def recorded(self) -> list[dict[str, Any]]:
        """Every exchange in the journal."""
        lines = [line for file in sorted(self.folder.glob("samples/*.jsonl")) for line in file.open()]
        return [line for line in map(json.loads, lines) if "request" in line]

    def counts(self, *rollouts: str) -> dict[str, Any]:
        """What a step over these rollouts would count; nothing is queued, since one reward is missing."""
        members = [{"rollout": rollout} for rollout in rollouts]
        body = {"key": "probe", "groups": [{"id": "g", "members": members}]}
        answer = self.http.post("/slipway/steps", json=body)
        assert answer.status_code == 422, answer.text
        return answer.json()["error"]["counts"]
