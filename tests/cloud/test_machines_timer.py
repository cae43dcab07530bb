"""The rented machine's own timer, on real SkyPilot: set back while the runtime answers, run out when it does
not. The runtime has no engine; skylet looks once a minute, so this takes its minutes."""

from __future__ import annotations

import sys
import textwrap
import time

import pytest

from tests.cloud.rig import REPOSITORY, Rig, wait_until

pytestmark = pytest.mark.slow

# Idle minutes, skylet's tick, and what a busy computer adds.
_RUNS_OUT_SECONDS = 60 + 60 + 50

_PROGRAM = """
import secrets, time
from pathlib import Path
from launcher.machines.cloud import CloudMachine
from launcher.machines.link import run_on
from launcher.machines.scripts import CODE
from runtime.schema import RuntimeConfig
begun = time.monotonic()
def told(what):
    print(f"[{time.monotonic() - begun:.1f}] {what}", flush=True)
here = Path.cwd()
machine = CloudMachine(
    "slip-0123abcd", here / "run", infra=["aws"], gpus="H100:4", idle_minutes=1, variant="cpu"
)
machine.arm()
armed_at = time.monotonic()
told("armed")
machine.push()
small = Path(REPOSITORY, "tests", "support", "small_runtime.py").read_bytes()
run_on(machine.host, f"cat > {CODE}/runtime/__main__.py", stdin=small)
machine.setup(told)
config = RuntimeConfig(
    run_id="slip-0123abcd", model_path="tiny", state_dir=machine.state_dir, socket_dir=machine.socket_dir,
    lease_seconds=3600,
)
machine.serve(config, secrets.token_urlsafe(16), told)
told("served")
while time.monotonic() - armed_at < RUNS_OUT:
    assert machine.ended() is None
    time.sleep(5)
run_on(machine.host, "true")
told("outlived its idle minutes")
print(run_on(machine.host, f"cat {machine.state_dir}/logs/keeper.log").stdout.decode())
frozen = run_on(machine.host, "pkill -STOP -f -- '-[m] runtime --config'")
assert frozen.returncode == 0, frozen
told("frozen")
machine._link.close()
machine._sky.end()
machine._home.end_server()
"""


def test_g04_a_busy_run_outlives_its_idle_minutes_and_a_frozen_one_does_not(runtime_rig: Rig) -> None:
    rig = runtime_rig
    given = f"REPOSITORY = {str(REPOSITORY)!r}\nRUNS_OUT = {_RUNS_OUT_SECONDS}\n"
    program = [sys.executable, "-c", given + textwrap.dedent(_PROGRAM)]
    print(rig.run(program, seconds=500, environ=rig.environ(PYTHONPATH=str(REPOSITORY))).ok())
    frozen_at = time.monotonic()
    assert rig.alive()
    wait_until(lambda: not rig.alive(), _RUNS_OUT_SECONDS, "the machine's own timer")
    print(f"terminated {time.monotonic() - frozen_at:.0f} s after the runtime froze")
