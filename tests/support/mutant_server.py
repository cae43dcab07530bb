"""Runs pytest in forks of one process that has already imported torch (runtime's environment).

Reads one JSON request a line from stdin, answers one a line on stdout. The mutated tree's own
modules (`runtime`, `tests`) are not imported before the fork, so each fork imports its own.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
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
    for line in sys.stdin:
        print(json.dumps(_run(json.loads(line))), flush=True)


def _run(ask: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryFile() as log:
        child = os.fork()
        if child == 0:
            _become(ask, log.fileno())
        code = _wait(child, ask["timeout"])
        log.seek(0)
        return {"exit_code": code, "output": log.read().decode(errors="replace")[-4000:]}


def _become(ask: dict[str, Any], log: int) -> None:
    """In the fork: the mutated tree is the current folder and comes first on the path."""
    import pytest

    os.setsid()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(ask["tree"])
    for name in [name for name in sys.modules if name.split(".")[0] in {"runtime", "launcher", "tests"}]:
        del sys.modules[name]
    sys.path[:] = [ask["tree"], *(entry for entry in sys.path if entry not in ("", os.environ["PYTHONPATH"]))]
    os.environ.update(PYTHONPATH=ask["tree"], CI="")
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
