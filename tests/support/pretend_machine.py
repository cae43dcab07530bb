"""A machine in this process, for what `run.py` does around a machine; the real ones are tested end to end.

It keeps the Machine protocol's promises (a test checks that it is one) and answers on a real Unix socket,
so relay, heartbeat, minder and guardian are the real ones. `acts` can make any call misbehave, and what is
only asked for as well. With a price it is like a rented one: its disk goes with it.
"""

from __future__ import annotations

import http.server
import json
import shutil
import socketserver
import tempfile
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launcher.types.durability import DurabilityStatus
from launcher.types.machine import Progress, Proof, PullReport, Stopped, never_stopped, no_progress
from runtime.shared.runtime_config import RuntimeConfig
from runtime.shared.statuses import RuntimeStatus

KIND = "pretend"
# Where a machine of that kind is found by its record, for `recorded._KINDS`.
PLACE = (__name__, "PretendMachine")
# Those of this process, by their folder.
_MACHINES: weakref.WeakValueDictionary[str, PretendMachine] = weakref.WeakValueDictionary()


class PretendMachine:
    """`calls` lists what was asked of it. `acts[name]` runs inside that call, before it does anything."""

    def __init__(
        self, folder: Path, acts: dict[str, Callable[[], None]] | None = None, price: float = 0.0
    ) -> None:
        self.folder = folder
        self.price = price
        self.sockets = Path(tempfile.mkdtemp(prefix="pretend-"))
        self.acts = acts or {}
        self.calls: list[str] = []
        self.renewals = 0
        self.token = ""
        self.config: RuntimeConfig | None = None
        self.phase = "ready"
        # Of its policy, and of the step that made it.
        self.step = 3
        self.proven = Proof(True, "nothing is left")
        self.standing = DurabilityStatus()
        # Whether what was asked of it last is wanted no more: for an act that takes its time.
        self.stopped: Stopped = never_stopped
        # Why the newest of its results cannot come any more.
        self.lost: str | None = None
        # Whether its record is enough to find it again; else there is nothing that another could end.
        self.found_again = False
        self._server: _Gateway | None = None
        _MACHINES[str(folder)] = self

    @classmethod
    def from_description(cls, description: dict[str, Any]) -> PretendMachine:
        """The machine of a record, by whoever ends it in this process."""
        return _MACHINES[description["folder"]]

    @property
    def kind(self) -> str:
        self._act("kind")
        return KIND

    @property
    def state_dir(self) -> str:
        self._act("state_dir")
        return str(self.folder)

    @property
    def socket_dir(self) -> str:
        self._act("socket_dir")
        return str(self.sockets)

    @property
    def device_type(self) -> str:
        self._act("device_type")
        return "cpu"

    @property
    def unarmed_seconds(self) -> float | None:
        self._act("unarmed_seconds")
        return 25.0 if self.price > 0 else None

    @property
    def price_per_hour(self) -> float | None:
        self._act("price_per_hour")
        return self.price

    @property
    def ephemeral(self) -> bool:
        self._act("ephemeral")
        return self.price > 0

    def provision(self, progress: Progress = no_progress) -> None:
        self._called("arm")

    def push(self) -> None:
        self._called("push")

    def setup(self, progress: Progress = no_progress) -> None:
        self._called("setup")
        progress("nothing to install")

    def serve(self, config: RuntimeConfig, token: str, progress: Progress = no_progress) -> Path:
        self.token, self.config = token, config
        self._called("serve")
        path = self.sockets / "gateway.sock"
        self._server = _Gateway(path, self)
        threading.Thread(target=self._server.serve_forever, args=(0.005,), daemon=True).start()
        return path

    def ended(self) -> str | None:
        self._act("ended")
        return None if self._server is not None else "its supervisor ended"

    def close_wandb(self, seconds: float = 0.0) -> None:
        self._act("close_wandb")

    def pull(
        self, into: Path, progress: Progress = no_progress, stopped: Stopped = never_stopped
    ) -> PullReport:
        self.stopped = stopped
        self._called("pull")
        progress("1 MB of 2 MB")
        (into / "adapter").mkdir(parents=True, exist_ok=True)
        return PullReport(into, files=0, bytes=0, seconds=0.0, step=None, lost=self.lost)

    def committed(self) -> int | None:
        self._act("committed")
        return self.standing.committed

    def make_durable(self, into: Path, stopped: Stopped = never_stopped) -> DurabilityStatus:
        self._act("make_durable")
        return self.standing

    def upload_checkpoints(self, results: Path, progress: Progress = no_progress) -> int:
        self._called("upload_checkpoints")
        return self.standing.durable or 0

    def down(self) -> None:
        self._called("down")
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
        shutil.rmtree(self.sockets, ignore_errors=True)

    def proof(self) -> Proof:
        self._called("proof")
        return self.proven

    def describe(self) -> dict[str, Any]:
        self._act("describe")
        if not self.found_again:
            return {}
        standing = {"price_per_hour": self.price, "where": "nowhere", "instance_type": "none"}
        return {"kind": KIND, "folder": str(self.folder), "standing": standing}

    def status(self) -> RuntimeStatus:
        """What the gateway says."""
        return RuntimeStatus.model_validate(
            {
                "run_id": self.config.run_id if self.config else "",
                "phase": self.phase,
                "model": "pretend",
                "served_name": "policy",
                "version": self.step,
                "step": self.step,
                "last_metrics": {"reward": 0.5},
                "children": [{"name": "trainer", "state": "failed", "detail": "out of memory"}]
                if self.phase == "failed"
                else [],
            }
        )

    def _called(self, name: str) -> None:
        self.calls.append(name)
        self._act(name)

    def _act(self, name: str) -> None:
        if name in self.acts:
            self.acts[name]()


class _Gateway(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True

    def __init__(self, path: Path, machine: PretendMachine) -> None:
        self.machine = machine
        self.gone = False
        super().__init__(str(path), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away meanwhile is no news."""

    def server_close(self) -> None:
        """A process that is gone does not answer on its open connections either."""
        self.gone = True
        super().server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Gateway  # type: ignore[assignment] - it is made by this one only
    protocol_version = "HTTP/1.1"

    def parse_request(self) -> bool:
        """False ends the connection without an answer."""
        return super().parse_request() and not self.server.gone

    def do_GET(self) -> None:
        if self.path == "/healthz":
            self._answer(200, {"ok": True})
        elif self.headers.get("Authorization") != f"Bearer {self.server.machine.token}":
            self._answer(401, {})
        elif self.path == "/slipway/status":
            self.server.machine.acts.get("status", lambda: None)()
            self._answer(200, self.server.machine.status().model_dump())
        else:
            self._answer(404, {})

    def do_PUT(self) -> None:
        self.server.machine.renewals += 1
        self._answer(200, {"lease_left_seconds": 1.0})

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class names it
        """Quiet."""

    def address_string(self) -> str:
        return "unix"
