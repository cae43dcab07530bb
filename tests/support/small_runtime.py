"""A runtime without an engine, for tests of what is launched, relayed, killed and resumed around one.

`small_launch.py` puts it in the place of `runtime/__main__.py`. Keeper, process tree, sockets, lease and
checkpoints are the real ones; a step commits at once, whatever it names, and a completion is a fresh word.

    {"cut": true} in a completion's body: the connection is lost after sampling, the first time
    {"stream": true}: the answer comes in three events
    {"held": true}: that it was asked stands in `held.jsonl` of the run's folder there, a line each time; the
        answer comes once there is a file `released` beside it
    {"bytes": N} in a step's client_state: each of its large files has so many
"""

from __future__ import annotations

import argparse
import functools
import http.server
import json
import os
import signal
import socketserver
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from runtime.shared import json_files, processes
from runtime.shared.checkpoint import CheckpointStore
from runtime.shared.stdin_token import read_token

PARTS = ("gateway", "trainer")
_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}
_BEAT_SECONDS = 5.0
_HELD_SECONDS = 0.05
_FILE_BYTES = 2000


def supervise(config_path: Path, state_dir: Path, token: bytes) -> int:
    """Start both parts, a dead one again, and end them when told to."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    children: dict[str, subprocess.Popen[bytes]] = {}
    while True:
        for part in PARTS:
            if part not in children or children[part].poll() is not None:
                children[part] = _start(part, config_path, state_dir, token)
        said = [{"name": part, "state": "ready", "restarts": 0} for part in PARTS]
        json_files.write_json(
            state_dir / "supervisor.json", {"phase": "ready", "children": said, "detail": None}
        )
        received = signal.sigtimedwait(_SIGNALS, _BEAT_SECONDS)
        if received is not None and received.si_signo != signal.SIGCHLD:
            break
    for child in children.values():
        child.terminate()
    for child in children.values():
        child.wait(timeout=60)
    return 0


def _start(part: str, config_path: Path, state_dir: Path, token: bytes) -> subprocess.Popen[bytes]:
    child = processes.spawn(
        [sys.executable, "-m", "runtime", "--config", str(config_path), "--part", part],
        death_signal=signal.SIGKILL,
        log=state_dir / "logs" / f"{part}.log",
        stdin=subprocess.PIPE,
    )
    assert child.stdin is not None
    child.stdin.write(token + b"\n")
    child.stdin.close()
    return child


class Gateway(socketserver.ThreadingUnixStreamServer):
    """What is behind the routes; all of it is on disk before it is answered."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, config: dict[str, Any], token: bytes) -> None:
        self.config, self.token = config, token.decode()
        self.state_dir = Path(config["state_dir"])
        self.store = CheckpointStore(self.state_dir / "checkpoints")
        self.lock = threading.Lock()
        self.answers: dict[str, str] = {}
        self._journal = self.state_dir / "answers.jsonl"
        if self._journal.exists():
            said = map(json.loads, self._journal.read_text().splitlines())
            self.answers = {line["request"]: line["answer"] for line in said}
        path = Path(config["socket_dir"]) / "gateway.sock"
        fresh = path.with_name(".gateway.sock")
        super().__init__(str(fresh), Handler)
        fresh.rename(path)

    def answer(self, request: str) -> tuple[str, bool]:
        """The word of a request id, and whether it is new."""
        with self.lock:
            known = self.answers.get(request)
            if known is None:
                self.answers[request] = uuid.uuid4().hex
                json_files.append_line(self._journal, {"request": request, "answer": self.answers[request]})
            return self.answers[request], known is None

    def hold(self, request: str) -> None:
        """Note that it was asked; until it is released."""
        with self.lock:
            json_files.append_line(self.state_dir / "held.jsonl", {"request": request})
        while not (self.state_dir / "released").exists():
            time.sleep(_HELD_SECONDS)

    def step(self, body: dict[str, Any]) -> dict[str, Any]:
        """Commit a step, once per key."""
        with self.lock:
            for name in self.store.names():
                state = self.store.load(name).state
                if state["key"] == body["key"]:
                    return _status(state)
            newest = self.store.newest()
            number = 1 if newest is None else newest.step + 1
            state = {"step": number, "key": body["key"], "client_state": body.get("client_state")}
            size = (state["client_state"] or {}).get("bytes", _FILE_BYTES)
            self.store.commit(number, number, state, functools.partial(_write, size))
            json_files.append_line(self.state_dir / "metrics.jsonl", {"step": number})
            return _status(state)

    def status(self) -> dict[str, Any]:
        newest = self.store.newest()
        number = 0 if newest is None else newest.step
        return {
            "run_id": self.config["run_id"],
            "phase": "ready",
            "model": self.config["model_path"],
            "served_name": "policy",
            "version": number,
            "step": number,
            "client_state": None if newest is None else newest.state["client_state"],
        }


def _write(size: int, folder: Path) -> None:
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text("{}")
    for name in ("adapter/adapter_model", "optimizer", "rng", "probe"):
        (folder / f"{name}.safetensors").write_bytes(os.urandom(size))


def _status(state: dict[str, Any]) -> dict[str, Any]:
    number = state["step"]
    return {"id": number, "key": state["key"], "state": "published", "version": number}


class Handler(http.server.BaseHTTPRequestHandler):
    server: Gateway  # type: ignore[assignment] - it is made by this one only
    protocol_version = "HTTP/1.1"
    wbufsize = -1

    def do_GET(self) -> None:
        if self.path == "/healthz":
            self._send(200, {"ok": True})
        elif not self._allowed():
            self._send(401, {"error": {"message": "no"}})
        elif self.path == "/slipway/status":
            self._send(200, self.server.status())
        elif self.path.startswith("/slipway/steps/"):
            number = int(self.path.partition("?")[0].rpartition("/")[2])
            self._send(200, _status(self.server.store.load(f"step-{number:06d}").state))
        else:
            self._send(404, {"error": {"message": "no such route"}})

    def do_PUT(self) -> None:
        if self._allowed():
            (self.server.state_dir / "lease").touch()
            os.utime(self.server.state_dir / "lease")
            self._send(200, {"lease_left_seconds": self.server.config["lease_seconds"]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._allowed():
            self._send(401, {"error": {"message": "no"}})
        elif self.path == "/slipway/steps":
            self._send(202, self.server.step(body))
        else:
            if body.get("held"):
                self.server.hold(self.headers["x-slipway-request"])
            word, fresh = self.server.answer(self.headers["x-slipway-request"])
            if body.get("cut") and fresh:
                self.close_connection = True
            elif body.get("stream"):
                self._stream(word)
            else:
                self._send(200, {"word": word})

    def _allowed(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {self.server.token}"

    def _stream(self, word: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for piece in (word[:8], word[8:], "[DONE]"):
            self.wfile.write(f"data: {piece}\n\n".encode())
            self.wfile.flush()
        self.close_connection = True

    def _send(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
        self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class names it
        """Quiet."""

    def address_string(self) -> str:
        return "unix"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--part", default="supervisor")
    options = parser.parse_args()
    token = read_token()
    config = json.loads(options.config.read_text())
    if options.part == "supervisor":
        return supervise(options.config, Path(config["state_dir"]), token)
    if options.part == "gateway":
        Gateway(config, token).serve_forever(0.05)
    signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main())
