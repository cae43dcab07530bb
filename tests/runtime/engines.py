"""The lives of one real engine: started warm, killed, started again (engine_server.py)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from runtime.engine import command, server
from runtime.shared import failpoints
from runtime.shared.schema import RuntimeConfig
from tests.runtime.conftest import REPOSITORY, TINY_MODEL, is_healthy
from tests.support.waiting import wait_until

START_SECONDS = 240.0


class Engine:
    """One engine; `pid` is that of the life it is in."""

    def __init__(self, folder: Path, armed: Path) -> None:
        self._sockets = Path(tempfile.mkdtemp(prefix="slip-"))
        config = RuntimeConfig(
            run_id="engine", model_path=str(TINY_MODEL), state_dir=str(folder), socket_dir=str(self._sockets)
        )
        (folder / "engine.json").write_text(config.model_dump_json())
        self.socket = command.socket_path(config, 0)
        self.log = folder / "engine.log"
        environ = {
            **os.environ,
            **command.environment(config, 0),
            server.ENVIRONMENT_MARK: "1",  # it has the environment already: no second exec
            "PYTHONPATH": str(REPOSITORY),
            failpoints.VARIABLE: f"file:{armed}",
        }
        environ.pop("PYTHONDONTWRITEBYTECODE", None)
        with self.log.open("wb") as log:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "tests.runtime.engine_server", "--config", folder / "engine.json"],
                cwd=REPOSITORY, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                text=True,
            )  # fmt: skip
        self._answer()
        self.pid = 0

    def start(self) -> None:
        """Begin another life."""
        self.pid = self._ask()["pid"]

    def until_ready(self) -> None:
        wait_until(lambda: is_healthy(self.socket), START_SECONDS, self._said)

    def ended(self) -> int:
        """Wait, bounded, for the end of this life; its exit code, negative for a signal."""
        return wait_until(lambda: self._ask(poll=self.pid), START_SECONDS, self._said)["exit_code"]

    def close(self) -> None:
        assert self._server.stdin
        self._server.stdin.close()  # its children die with it
        self._server.wait(120)
        shutil.rmtree(self._sockets, ignore_errors=True)

    def _ask(self, **ask: Any) -> dict[str, Any]:
        assert self._server.stdin
        self._server.stdin.write(json.dumps(ask) + "\n")
        self._server.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._server.stdout
        line = self._server.stdout.readline()
        assert line, self._said()
        return json.loads(line)

    def _said(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]
