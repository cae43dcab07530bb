"""Runs pytest in forks of one process that has already imported what takes long, in either environment.

    python -m tests.support.mutant_server MODULE…      the modules to import first; none of ours

Reads one JSON request a line from stdin, answers one a line on stdout (`mutant_runs.py` asks). The tree's own
modules are forgotten in a fork, so each imports those of the tree it was given. A fork whose tests use the
fixture `engine` asks in its turn, with {"wants": "engine"}, and is told the variables that point at one.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import pytest

OURS = frozenset({"runtime", "launcher", "tests"})
_TAIL_BYTES = 16_000
# Neither pytest's "all passed" nor its "some failed".
_HUNG, _BROKEN = 124, 70
# At it, a fork writes where each of its threads is.
_SAY_WHERE = signal.SIGUSR2


def main() -> None:
    """Import, then serve until stdin ends."""
    import_for_good(sys.argv[1:])
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)  # a pool of threads would not survive the fork
    for line in sys.stdin:
        ask = json.loads(line)
        # Else it is an engine, for a fork that has ended meanwhile.
        if "tests" in ask:
            print(json.dumps(_run(ask)), flush=True)
    os._exit(0)  # what was imported has much to say at an end


def import_for_good(modules: Iterable[str]) -> None:
    """Import them; the collector looks at none of it again, here or in a fork: pytest collects at its end."""
    gc.disable()
    for name in modules:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()


def forget_our_modules(tree: str) -> None:
    """In a fork: what is ours comes from `tree` from now on, also in the processes that are started."""
    for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
        del sys.modules[name]
    before = ("", os.getcwd(), os.environ["PYTHONPATH"])
    os.chdir(tree)
    sys.path[:] = [tree, *(entry for entry in sys.path if entry not in before)]
    os.environ["PYTHONPATH"] = tree
    importlib.invalidate_caches()


def _run(ask: dict[str, Any]) -> dict[str, Any]:
    """Everything the fork leaves in the temporary folder goes with it."""
    folder = Path(tempfile.mkdtemp(prefix="mutant-"))
    with (folder / "log").open("w+b") as log, (folder / "failed").open("w+") as failed:
        child = os.fork()
        if child == 0:
            _become(ask, folder, log.fileno(), failed.fileno())
        code = _wait(child, log, ask["quiet_seconds"])
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
        said = log.read().decode(errors="replace")
        failed.seek(0)
        answer = {"exit_code": code, "failed": failed.read().splitlines(), "output": said}
    shutil.rmtree(folder, ignore_errors=True)
    return answer


def _become(ask: dict[str, Any], folder: Path, log: int, failed: int) -> None:
    """In the fork: run the tests of the tree, and end."""
    code = _BROKEN
    try:
        os.setsid()
        door = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
        for descriptor, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
            os.dup2(source, descriptor)
        # A descriptor of its own: pytest captures the second.
        faulthandler.register(_SAY_WHERE, file=os.dup(log), all_threads=True)
        forget_our_modules(ask["tree"])
        os.environ.update(CI="", TMPDIR=str(folder))
        tempfile.tempdir = None
        _find_no_smaller_example()
        plugin = _Plugin(*door, os.fdopen(os.dup(failed), "w", buffering=1))
        # `-m ""`: the tests were chosen by name, also where they are too long for every run.
        words = ["-q", "-m", "", "-p", "no:cacheprovider", "--disable-warnings", "--rootdir", ask["tree"]]
        words += ["--basetemp", str(folder / "t"), *ask["words"]]
        code = int(pytest.main([*words, *ask["tests"]], plugins=[plugin]))
    except BaseException:  # noqa: BLE001 - a fork must not run on into its parent
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _find_no_smaller_example() -> None:
    """The first that fails is enough, and none is remembered for the mutants to come."""
    if hypothesis := sys.modules.get("hypothesis"):
        phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
        hypothesis.settings.register_profile("mutants", phases=phases, database=None)
        hypothesis.settings.load_profile("mutants")


def _wait(child: int, log: IO[bytes], quiet_seconds: float) -> int:
    """The fork's exit code.

    One that says nothing for so long says where each thread is, and is ended: it neither passed nor failed.
    """
    size, since = 0, time.monotonic()
    while time.monotonic() < since + quiet_seconds:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if (grown := os.fstat(log.fileno()).st_size) != size:
            size, since = grown, time.monotonic()
        time.sleep(0.02)
    os.kill(child, _SAY_WHERE)
    time.sleep(1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return _HUNG


class _Plugin:
    """In the fork's pytest: fetches the engine its tests want, and writes down which of them fail."""

    def __init__(self, asked: IO[str], told: IO[str], failed: IO[str]) -> None:
        self._asked, self._told, self._failed = asked, told, failed

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """pytest knows best which fixtures a test comes to use."""
        if any("engine" in getattr(item, "fixturenames", ()) for item in session.items):
            print(json.dumps({"wants": "engine"}), file=self._told, flush=True)
            answer = json.loads(self._asked.readline())
            if "trouble" in answer:
                pytest.exit(f"no engine came up:\n{answer['trouble']}", returncode=_BROKEN)
            os.environ.update(answer["environ"])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Set-up, call or tear-down."""
        if report.failed:
            print(report.nodeid, file=self._failed, flush=True)


if __name__ == "__main__":
    main()
