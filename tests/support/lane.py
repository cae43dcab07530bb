"""One lane: a pytest of its own that runs some of the tests, and what it has said so far.

Neighbours: `lane_reports.py` is the plugin in it, `lanes.py` starts it and asks for its reports. Knows
nothing of which tests belong together.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runtime.shared import processes
from tests.support.environment import REPOSITORY
from tests.support.lane_reports import FILE_VARIABLE

# In the environment of a lane: whoever runs in one starts none.
LANE_VARIABLE = "SLIPWAY_LANE"
_POLL_SECONDS = 0.05
# Its fixtures end what they started: engines, rigs, whole runs.
_END_SECONDS = 180
_TAIL_CHARACTERS = 6000
# A test that takes longer hangs: the lane says where each of its threads is, and ends. Else all of its tests
# would be waited for until somebody ends the whole suite, which says nothing. One test runs all those of the
# mutations first: 19 minutes where thirty programs shared two cores.
_HANGS_SECONDS = 1800
_HANGS = ("-o", f"faulthandler_timeout={_HANGS_SECONDS}", "-o", "faulthandler_exit_on_timeout=true")
# pytest's own words: all passed, some failed.
_RAN = (0, 1)


class LaneError(Exception):
    """A lane ended without running what it was given; the text is the end of what it said."""


class Lane:
    """Runs from when it is made. `nodeids` are run in their order, by `python`."""

    def __init__(
        self, name: str, python: Path | str, nodeids: Sequence[str], environ: Mapping[str, str], *words: str
    ) -> None:
        self.name = name
        self._folder = tempfile.TemporaryDirectory(prefix=f"slipway-lane-{name}-")
        folder = Path(self._folder.name)
        chosen = folder / "tests"
        chosen.write_text("\n".join(nodeids) + "\n")
        (folder / "reports").touch()
        self._lines = (folder / "reports").open(encoding="utf-8")
        self._log = folder / "log"
        self._cases: defaultdict[str, set[str]] = defaultdict(set)
        self._finished: set[str] = set()
        self._stopped = False
        self._reports: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [python, "-m", "pytest", "-q", "-m", "", "-p", "no:cacheprovider",
                 "-p", "tests.support.lane_reports", "--rootdir", REPOSITORY, *_HANGS, *words, f"@{chosen}"],
                cwd=REPOSITORY,
                env={**environ, FILE_VARIABLE: str(folder / "reports"), LANE_VARIABLE: name},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # A Ctrl-C is handed on once; so is the end of this process, however it goes. The fixtures of
                # a lane then end what they started.
                start_new_session=True,
                preexec_fn=processes.preexec(signal.SIGINT),
            )  # fmt: skip

    def reports(self, nodeid: str) -> list[dict[str, Any]]:
        """The serialised reports of a case, or of all cases of a test function; waits until the last is over.

        Raises LaneError when the lane ends before.
        """
        while not self._over(nodeid):
            ended = self._process.poll() is not None
            if not self._read() and ended:
                raise LaneError(f"the lane {self.name} ended without running {nodeid}:\n{self._tail()}")
        return [report for case in self._named(nodeid) for report in self._reports[case]]

    def stop(self) -> None:
        """Have it end what it started, if it still runs tests: the session here was interrupted."""
        if self._process.poll() is None and not self._all_over() and not self._stopped:
            self._stopped = True
            self._process.send_signal(signal.SIGINT)

    def close(self) -> str | None:
        """Stop it and wait. What was wrong with its end; None when nothing was, or when asked before."""
        if self._lines.closed:
            return None
        self.stop()
        try:
            code = self._process.wait(timeout=_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        well = self._stopped or code in _RAN
        trouble = None if well else f"the lane {self.name} ended with {code}:\n{self._tail()}"
        self._lines.close()
        self._folder.cleanup()
        return trouble

    def _named(self, nodeid: str) -> list[str]:
        return [nodeid] if nodeid in self._finished else sorted(self._cases[nodeid])

    def _over(self, nodeid: str) -> bool:
        return nodeid in self._finished or (
            bool(self._cases.get(nodeid)) and self._cases[nodeid] <= self._finished
        )

    def _all_over(self) -> bool:
        while self._read(wait=False):
            pass
        return bool(self._cases) and all(cases <= self._finished for cases in self._cases.values())

    def _read(self, wait: bool = True) -> bool:
        """Take one more line in; whether there was one. A line without its end is still being written."""
        at = self._lines.tell()
        line = self._lines.readline()
        if line.endswith("\n"):
            self._take(json.loads(line))
            return True
        self._lines.seek(at)
        if wait:
            time.sleep(_POLL_SECONDS)
        return False

    def _take(self, line: dict[str, Any]) -> None:
        if "collected" in line:
            for case in line["collected"]:
                self._cases[function_of(case)].add(case)
        elif "finished" in line:
            self._finished.add(line["finished"])
        else:
            self._reports[line["nodeid"]].append(line["report"])

    def _tail(self) -> str:
        self._process.wait(timeout=_END_SECONDS)
        return self._log.read_text(errors="replace")[-_TAIL_CHARACTERS:]


def function_of(nodeid: str) -> str:
    """The test function a case belongs to: its id without the parameters."""
    return nodeid.split("[", 1)[0]


def in_a_lane() -> bool:
    """Whether this process is a lane's, or was started by one."""
    return LANE_VARIABLE in os.environ
