"""Real engines that start warm (engine_server.py): the lives of one, killed and started again, or one of each
model, one after the other.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from runtime.engine import command, server
from runtime.shared import failpoints
from runtime.shared.runtime_config import RuntimeConfig
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

    @contextmanager
    def serving(self, folder: Path, **settings: Any) -> Iterator[Path]:
        """An engine with settings of its own, its files in `folder`: its socket, once it is ready.

        An assertion fails with what it said where it ends instead.
        """
        sockets = Path(tempfile.mkdtemp(prefix="slip-"))
        config = RuntimeConfig.model_validate(
            {"run_id": "engine", "state_dir": str(folder), "socket_dir": str(sockets), **settings}
        )
        (folder / "engine.json").write_text(config.model_dump_json())
        pid = self._ask(config=str(folder / "engine.json"))["pid"]
        log = folder / "engine.log"

        def ready() -> bool:
            assert not self._ask(poll=pid), log.read_text(errors="replace")
            return is_healthy(command.socket_path(config, 0))

        try:
            wait_until(ready, START_SECONDS, lambda: log.read_text(errors="replace")[-4000:])
            yield command.socket_path(config, 0)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            shutil.rmtree(sockets, ignore_errors=True)

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
