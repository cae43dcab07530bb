"""A rented run that goes well: entered while it works; afterwards nothing is missing and nothing is left.

Neighbours: `launched.py` starts such a run; `test_secrets.py` and `test_launch.py` look on.
"""

from __future__ import annotations

import json
import re

import psutil

from tests.cloud.launched import Launched, left, running, verb
from tests.cloud.rig import Rig
from tests.support.waiting import wait_until


def skypilots_server_rests(rig: Rig) -> None:
    """While the run is at work, only the process that asks SkyPilot is there; its server is not."""
    assert not running(rig, "sky_server", "SkyPilot:")
    for pid in running(rig, "sky_calls"):
        print(f"SkyPilot in mid-run: {psutil.Process(pid).memory_full_info().pss / 1e6:.0f} MB")


def enter_the_machine(rig: Rig, launched: Launched) -> None:
    """Raises AssertionError where one of the ways does not lead there."""
    run, name = launched.run.name, f"ip-{rig.witness('run')[0]['address'].replace('.', '-')}"
    assert name in verb(rig, "ssh", run, "--", "hostname")
    assert "42" in verb(rig, "exec", run, "--", "python", "-c", "import torch; print(6 * 7)")
    assert "$27.52/h" in verb(rig, "status", run)
    assert "supervisor" in verb(rig, "logs", run, "--which", "keeper")
    config = rig.home / ".ssh" / "config"
    assert re.fullmatch(r'Include "\S+/runs/\*/ssh_config"\n', config.read_text())
    plain = ("-F", str(config))
    assert name in rig.run(["ssh", *plain, run, "hostname"]).ok()
    rig.run(["scp", *plain, f"{run}:/etc/hostname", str(rig.folder / "hostname")]).ok()
    assert name in (rig.folder / "hostname").read_text()


def home_and_gone(rig: Rig, launched: Launched, steps: int) -> None:
    """A run that ended well: its price was shown, its results are here, its one machine is proven gone."""
    assert "27.52" in launched.text and "down: verified" in launched.text
    results = launched.run / "results"
    assert json.loads((results / "adapter" / "state.json").read_text())["step"] >= steps
    assert (results / "logs" / "trainer.log").stat().st_size
    assert len((results / "metrics.jsonl").read_text().splitlines()) >= steps
    (run,) = rig.witness("run")
    assert [one["id"] for one in rig.witness("terminate")] == [run["id"]]
    record = launched.record
    assert record["state"] == "verified" and record["proof"]["verified"]
    assert not (rig.home / ".ssh" / "config").exists()
    wait_until(lambda: not left(rig), what=lambda: f"{left(rig)} to be gone")
