"""Arms a rented machine and leaves it to its own timer, in one of two ways; says when that was.

python left_to_its_timer.py 'laptop lost' RUN_ID RUNS_OUT_SECONDS      everything of the laptop dies
python left_to_its_timer.py frozen RUN_ID RUNS_OUT_SECONDS             the runtime on the machine stands still
"""

from __future__ import annotations

import secrets
import signal
import sys
import time
from pathlib import Path

from launcher.backends.cloud_machine import CloudMachine
from launcher.backends.ssh.link import run_on
from launcher.backends.ssh.machine_scripts import CODE
from runtime.shared.runtime_config import RuntimeConfig
from tests.support.environment import REPOSITORY
from tests.support.telling import told


def lose_the_laptop(machine: CloudMachine) -> None:
    """Everything of it at once."""
    machine._sky.end()
    for process in machine._home.processes():
        process.send(signal.SIGKILL)
    told(f"left at {time.time()}")


def serve(machine: CloudMachine, run_id: str) -> None:
    """A runtime without an engine."""
    machine.push()
    small = (REPOSITORY / "tests" / "support" / "small_runtime.py").read_bytes()
    run_on(machine.host, f"cat > {CODE}/runtime/__main__.py", stdin=small)
    machine.setup(told)
    config = RuntimeConfig(
        run_id=run_id,
        model_path="tiny",
        state_dir=machine.state_dir,
        socket_dir=machine.socket_dir,
        lease_seconds=3600,
    )
    machine.serve(config, secrets.token_urlsafe(16), told)
    told("served")


def outlive(machine: CloudMachine, until: float) -> None:
    """It answers for longer than its idle minutes and is still there: its timer was set back."""
    while time.monotonic() < until:
        assert machine.ended() is None
        time.sleep(5)
    run_on(machine.host, "true")
    told("outlived its idle minutes")
    keeper = run_on(machine.host, f"cat {machine.state_dir}/logs/keeper.log").stdout.decode()
    print(keeper)
    # Armed for this boot, at the first try or at one of the next: a busy machine may miss a bound.
    assert any(line.endswith("the machine's timer is reset") for line in keeper.splitlines())


def freeze(machine: CloudMachine) -> None:
    frozen = run_on(machine.host, "pkill -STOP -f -- '-[m] runtime --config'")
    assert frozen.returncode == 0, frozen
    told(f"left at {time.time()}")
    assert machine._link is not None
    machine._link.close()
    machine._sky.end()
    machine._home.end_server()


def main(case: str, run_id: str, runs_out_seconds: float) -> None:
    machine = CloudMachine(
        run_id, Path.cwd() / "run", infra=["aws"], gpus="H100:4", idle_minutes=1, variant="cpu"
    )
    machine.provision()
    armed_at = time.monotonic()
    told("armed")
    if case == "laptop lost":
        lose_the_laptop(machine)
    else:
        serve(machine, run_id)
        outlive(machine, armed_at + runs_out_seconds)
        freeze(machine)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
