"""Engines of a whole or a broken tree, in the time of a fork: forks of one process that has imported vLLM.

Reads one JSON object a line, answers one a line (`mutant_engines.py` asks, in the runtime's environment):

    {"start": tree}    → {"engine": pid, "environ": the variables that point tests at it}, once it is up;
                         {"trouble": its last words} where it did not come up
    {"sound": pid}     → {"sound": whether it still makes a token}
    {"end": pid}       → {}

Nothing of ours is imported before the fork but what this process itself needs: everything an engine's process
has of ours, `worker.install` too, comes from the tree it is started for. What is read at exec only must be
as in the whole tree: a mutant of that has to start its engine itself.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

import httpx

from runtime.engine import command, server
from runtime.shared import processes
from runtime.shared.runtime_config import RuntimeConfig
from tests.support.mutant_server import forget_our_modules, import_for_good

_START_SECONDS = 240.0
# What `engine.prepare` and `engine.run` import of vLLM, and vLLM then.
_PRELOADED = (
    "vllm.entrypoints.launchers.cli_args",
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.entrypoints.launchers.launcher",
    "vllm.lora.punica_wrapper.punica_cpu",
    "vllm.lora.worker_manager",
    "vllm.model_executor.models.qwen2",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
)
# Of each engine alone, and read when it starts.
_ITS_OWN = frozenset({"TMPDIR", "VLLM_RPC_BASE_PATH"})


def main() -> None:
    """Import, then serve until stdin ends."""
    _enter_environment()
    door = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints
    import_for_good(_PRELOADED)
    engines = Engines()
    for line in sys.stdin:
        print(json.dumps(engines.answer(json.loads(line))), file=door, flush=True)
    engines.end_all()
    os._exit(0)  # what was imported has much to say at an end


class Engines:
    """Those that run, by their process ids."""

    def __init__(self) -> None:
        self._folders: dict[int, Path] = {}

    def answer(self, ask: dict[str, Any]) -> dict[str, Any]:
        if "start" in ask:
            return self._start(ask["start"])
        if "sound" in ask:
            # Its core may be dead: then /health is 200 for a moment more.
            token = {"model": command.BASE_NAME, "prompt": [5], "max_tokens": 1}
            return {"sound": _answers(self._socket(ask["sound"]), "POST", "/v1/completions", token)}
        self._end(ask["end"])
        return {}

    def end_all(self) -> None:
        for pid in list(self._folders):
            self._end(pid)

    def _start(self, tree: str) -> dict[str, Any]:
        folder = Path(tempfile.mkdtemp(prefix="slip-"))
        in_child = processes.preexec(signal.SIGKILL)
        pid = os.fork()
        if pid == 0:
            in_child()
            _become(tree, folder)
        self._folders[pid] = folder
        end = time.monotonic() + _START_SECONDS
        while not _answers(self._socket(pid), "GET", "/health"):
            if os.waitpid(pid, os.WNOHANG)[0] or time.monotonic() > end:
                said = (folder / "engine.log").read_text(errors="replace")[-4000:]
                self._end(pid)
                return {"trouble": said}
            time.sleep(0.05)
        environ = {
            "SLIPWAY_TEST_ENGINE_SOCKET": str(self._socket(pid)),
            "SLIPWAY_TEST_ENGINE_CONFIG": str(folder / "runtime.json"),
        }
        return {"engine": pid, "environ": environ}

    def _end(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
        shutil.rmtree(self._folders.pop(pid), ignore_errors=True)

    def _socket(self, pid: int) -> Path:
        return self._folders[pid] / "engine-0.sock"


def _answers(socket: Path, method: str, path: str, body: dict[str, Any] | None = None) -> bool:
    try:
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(socket)), timeout=30) as http:
            return http.request(method, f"http://x{path}", json=body).status_code == 200
    except httpx.TransportError:
        return False


def _enter_environment() -> None:
    """Start this program again with what the loader and OpenMP read at exec."""
    if server.ENVIRONMENT_MARK in os.environ:
        return
    words = command.environment(_config(Path.cwd(), Path("/nowhere")), 0)
    environ = os.environ | {name: words[name] for name in words.keys() - _ITS_OWN}
    environ[server.ENVIRONMENT_MARK] = "1"
    os.execve(sys.executable, [sys.executable, "-m", __spec__.name], environ)


def _config(tree: Path, folder: Path) -> RuntimeConfig:
    model = tree / "runtime" / "tiny" / "model"
    return RuntimeConfig(run_id="test", model_path=str(model), state_dir=str(folder), socket_dir=str(folder))


def _become(tree: str, folder: Path) -> NoReturn:
    """In the fork: what `python -m runtime.engine.server` is in this tree once it has its environment."""
    try:
        os.setsid()
        log = os.open(folder / "engine.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        for descriptor, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
            os.dup2(source, descriptor)
        expected = _read_at_exec(server, _config(Path(tree), folder))
        forget_our_modules(tree)
        its = importlib.import_module("runtime.engine.server")
        its_config = importlib.import_module("runtime.shared.runtime_config")
        told = _config(Path(tree), folder).model_dump_json()
        (folder / "runtime.json").write_text(told)
        config = its_config.RuntimeConfig.model_validate_json(told)
        if _read_at_exec(its, config) != expected:
            raise ValueError("the mutation is in what an engine reads at exec: this test must start its own")
        words = its.environment(config, 0)
        os.environ.update({name: words[name] for name in _ITS_OWN})
        tempfile.tempdir = None
        its.run(config, 0, its.prepare(config, 0))
    except BaseException:  # noqa: BLE001 - a fork must not run on into its parent
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(1)


def _read_at_exec(of: Any, config: Any) -> dict[str, str]:
    words: dict[str, str] = of.environment(config, 0)
    return {name: words[name] for name in words.keys() - _ITS_OWN}


if __name__ == "__main__":
    main()
