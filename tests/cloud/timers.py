"""What waits for SkyPilot's own minute: begun before the other tests of this folder, asked after them.

Each case is a laptop's program on a rig of its own, which ends by leaving a machine to its own timer and says
when that was; the provider's witness says when the machine ended. The runtime in it has no engine.
Neighbours: `conftest.py` begins them, `test_timers.py` asks.
"""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from tests.cloud.rig import REPOSITORY, Rig, rig_in
from tests.cloud.runtime_image import runtime_binds
from tests.support.environment import PROGRAMS
from tests.support.waiting import wait_until

IDLE_SECONDS = 60
# Idle minutes, skylet's tick, and what a busy computer adds.
RUNS_OUT_SECONDS = IDLE_SECONDS + 60 + 50
# Besides: how long a supervisor may be silent before it counts as frozen.
GONE_SECONDS = RUNS_OUT_SECONDS + 30
# To arm takes less on a computer that is not busy with all the lanes; one that is ends a machine later, too.
_ARMED_SECONDS = 60
_LATER_SECONDS = 100
_PROGRAM_SECONDS = 1800


class Timers:
    """The cases that were begun, by their names."""

    def __init__(self) -> None:
        self._rigs = ExitStack()
        self._begun: dict[str, Timed] = {}

    def begin(self, names: list[str], scratch: Path) -> None:
        """Each on a rig of its own, all at once."""
        self._begun = {
            name: Timed(
                self._rigs.enter_context(rig_in(scratch / name.replace(" ", "-"), runtime_binds())), name
            )
            for name in names
        }

    def __getitem__(self, name: str) -> Timed:
        return self._begun[name]

    def close(self) -> None:
        self._rigs.close()


class Timed:
    """One case."""

    def __init__(self, rig: Rig, name: str) -> None:
        # Runs side by side on one computer have doors of their own in /tmp.
        words = [name, f"slip-{rig.id}", str(RUNS_OUT_SECONDS)]
        command = [sys.executable, str(PROGRAMS / "cloud" / "left_to_its_timer.py"), *words]
        self.rig = rig
        self._log = rig.folder / "timed.log"
        with self._log.open("wb") as log:
            environ = rig.environ(PYTHONPATH=str(REPOSITORY))
            self._process = rig.start(command, environ=environ, stdout=log, stderr=subprocess.STDOUT)

    def seconds_until_gone(self) -> tuple[float, float]:
        """From the moment the machine was left until the provider saw it end, and what it may take on a
        computer as busy as this one. AssertionError where the program failed, or nothing ended."""
        code = self._process.wait(_PROGRAM_SECONDS)
        said = self._log.read_text(errors="replace")
        print(said)
        assert code == 0, said
        found = re.search(r"left at ([0-9.]+)", said)
        assert found is not None
        # Twice as long: how long it took is for the test to judge.
        wait_until(lambda: not self.rig.alive(), 2 * RUNS_OUT_SECONDS, "the machine's own timer")
        (ended,) = self.rig.witness("terminate")
        armed = re.search(r"\[([0-9.]+)\] armed", said)
        assert armed is not None
        later = min(max(0.0, float(armed[1]) - _ARMED_SECONDS), _LATER_SECONDS)
        return ended["time"] - float(found[1]), GONE_SECONDS + later
