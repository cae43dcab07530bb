"""What waits for SkyPilot's own minute: begun before the other tests of this folder, asked after them.

Each case is a laptop's program on a rig of its own, which ends by leaving a machine to its own timer and says
when that was; the provider's witness says when the machine ended. The runtime in it has no engine.
Neighbours: `conftest.py` begins them, `test_timers.py` asks.
"""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from contextlib import ExitStack
from pathlib import Path

from tests.cloud.rig import REPOSITORY, Rig, rig_in, wait_until
from tests.cloud.runtime_image import runtime_binds

IDLE_SECONDS = 60
# Idle minutes, skylet's tick, and what a busy computer adds.
RUNS_OUT_SECONDS = IDLE_SECONDS + 60 + 50
# Besides: how long a supervisor may be silent before it counts as frozen.
GONE_SECONDS = RUNS_OUT_SECONDS + 30
_PROGRAM_SECONDS = 600

_START = """
import secrets, time
from pathlib import Path
from launcher.machines.cloud import CloudMachine
from launcher.machines.link import run_on
from launcher.machines.scripts import CODE
from launcher.safety import processes
from runtime.schema import RuntimeConfig
import signal
begun = time.monotonic()
def told(what):
    print(f"[{time.monotonic() - begun:.1f}] {what}", flush=True)
here = Path.cwd()
machine = CloudMachine(
    RUN_ID, here / "run", infra=["aws"], gpus="H100:4", idle_minutes=1, variant="cpu"
)
machine.arm()
armed_at = time.monotonic()
told("armed")
"""

# Everything of the laptop dies at once after arming.
_LAPTOP_LOST = """
machine._sky.end()
for process in machine._home.processes():
    process.send(signal.SIGKILL)
told(f"left at {time.time()}")
"""

# It answers for longer than its idle minutes, is still there, and then stands still.
_FROZEN = """
machine.push()
small = Path(REPOSITORY, "tests", "support", "small_runtime.py").read_bytes()
run_on(machine.host, f"cat > {CODE}/runtime/__main__.py", stdin=small)
machine.setup(told)
config = RuntimeConfig(
    run_id=RUN_ID, model_path="tiny", state_dir=machine.state_dir, socket_dir=machine.socket_dir,
    lease_seconds=3600,
)
machine.serve(config, secrets.token_urlsafe(16), told)
told("served")
while time.monotonic() - armed_at < RUNS_OUT:
    assert machine.ended() is None
    time.sleep(5)
run_on(machine.host, "true")
told("outlived its idle minutes")
keeper = run_on(machine.host, f"cat {machine.state_dir}/logs/keeper.log").stdout.decode()
print(keeper)
assert "set back" in keeper and "could not be armed" not in keeper
frozen = run_on(machine.host, "pkill -STOP -f -- '-[m] runtime --config'")
assert frozen.returncode == 0, frozen
told(f"left at {time.time()}")
machine._link.close()
machine._sky.end()
machine._home.end_server()
"""
PROGRAMS = {"laptop lost": _LAPTOP_LOST, "frozen": _FROZEN}


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
        given = f"REPOSITORY = {str(REPOSITORY)!r}\nRUNS_OUT = {RUNS_OUT_SECONDS}\n"
        # Runs side by side on one computer have doors of their own in /tmp.
        given += f"RUN_ID = 'slip-{rig.id}'\n"
        program = [sys.executable, "-c", given + textwrap.dedent(_START + PROGRAMS[name])]
        self.rig = rig
        self._log = rig.folder / "timed.log"
        with self._log.open("wb") as log:
            environ = rig.environ(PYTHONPATH=str(REPOSITORY))
            self._process = rig.start(program, environ=environ, stdout=log, stderr=subprocess.STDOUT)

    def seconds_until_gone(self) -> float:
        """From the moment the machine was left until the provider saw it end. AssertionError where the
        program failed, or nothing ended in time."""
        code = self._process.wait(_PROGRAM_SECONDS)
        said = self._log.read_text(errors="replace")
        print(said)
        assert code == 0, said
        found = re.search(r"left at ([0-9.]+)", said)
        assert found is not None
        # Twice as long: how long it took is for the test to judge.
        wait_until(lambda: not self.rig.alive(), 2 * RUNS_OUT_SECONDS, "the machine's own timer")
        (ended,) = self.rig.witness("terminate")
        return ended["time"] - float(found[1])
