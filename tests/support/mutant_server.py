"""Runs pytest in forks of one process that has already imported torch (runtime's environment).

Reads one JSON request a line from stdin, answers one a line on stdout. Forks whose mutation is not in the
engine's own process share one engine, started when the first of them asks. The mutated tree's own
modules (`runtime`, `tests`) are not imported before the fork, so each fork imports its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def main() -> None:
    """Preload what every runtime test imports, then serve until stdin ends."""
    import numpy  # noqa: F401
    import peft  # noqa: F401
    import pytest  # noqa: F401
    import safetensors.torch  # noqa: F401
    import torch
    import torchtune  # noqa: F401
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401

    torch.set_num_threads(1)  # a pool of threads would not survive the fork
    with contextlib.ExitStack() as cleanup:
        shared: dict[str, str] = {}
        for line in sys.stdin:
            ask = json.loads(line)
            if ask["engine"] and not shared:
                shared = _start_engine(cleanup)
            print(json.dumps(_run(ask, shared if ask["engine"] else {})), flush=True)


def _start_engine(cleanup: contextlib.ExitStack) -> dict[str, str]:
    """Start the engine of the tree as it is; the variables that point the tests at it."""
    from tests.runtime.conftest import start_engine

    folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory()))
    engine = start_engine(folder)
    cleanup.callback(engine.end)
    engine.wait_until_ready()
    return {
        "SLIPWAY_TEST_ENGINE_SOCKET": str(engine.socket),
        "SLIPWAY_TEST_ENGINE_CONFIG": str(folder / "runtime.json"),
    }


def _run(ask: dict[str, Any], environ: dict[str, str]) -> dict[str, Any]:
    with tempfile.TemporaryFile() as log:
        child = os.fork()
        if child == 0:
            _become(ask, environ, log.fileno())
        code = _wait(child, ask["timeout"])
        log.seek(0)
        return {"exit_code": code, "output": log.read().decode(errors="replace")[-4000:]}


def _become(ask: dict[str, Any], environ: dict[str, str], log: int) -> None:
    """In the fork: the mutated tree is the current folder and comes first on the path."""
    import pytest

    os.setsid()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(ask["tree"])
    for name in [name for name in sys.modules if name.split(".")[0] in {"runtime", "launcher", "tests"}]:
        del sys.modules[name]
    sys.path[:] = [ask["tree"], *(entry for entry in sys.path if entry not in ("", os.environ["PYTHONPATH"]))]
    os.environ.update(environ, PYTHONPATH=ask["tree"], CI="")
    confine = os.path.join(ask["tree"], "tests", "runtime")
    arguments = ["-q", "-x", "-p", "no:cacheprovider", "--rootdir", ask["tree"], "--confcutdir", confine]
    os._exit(int(pytest.main([*arguments, *ask["tests"]])))


def _wait(child: int, timeout: float) -> int:
    """The fork's exit code; one that hangs is ended with its session and counts as neither pass nor fail."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return 124


if __name__ == "__main__":
    main()
