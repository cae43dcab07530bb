"""`launch --gpus H100:4` as a user types it, on the test cloud: SkyPilot, sshd, vLLM, trainer and signals are
real; the price is the test catalog's, the GPUs are this computer's CPUs."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cloud.rig import REPOSITORY, Rig, wait_until

pytestmark = pytest.mark.slow

_LAUNCH = str(Path(sys.executable).with_name("launch"))
_RENTED = ("--gpus", "H100:4", "--infra", "aws", "-y")
_STEPS = 10
EVERYWHERE = " ".join(f"{region}{zone}" for region in ("us-east-1", "us-west-2") for zone in "abcdef")


class Launched:
    """`launch` on a rig's laptop; all it says is in `text`."""

    def __init__(self, rig: Rig, words: Sequence[str], **environ: str) -> None:
        self._rig = rig
        self._log = rig.folder / "launch.txt"
        with self._log.open("wb") as log:
            self.process = rig.start(
                [_LAUNCH, *words],
                cwd=REPOSITORY,
                environ=rig.environ(SLIPWAY_CLOUD_VARIANT="cpu", NO_COLOR="1", **environ),
                stdout=log,
                stderr=log,
            )

    @property
    def text(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_for(self, text: str, seconds: float) -> None:
        wait_until(
            lambda: text in self.text or self.process.poll() is not None, seconds, f"{text}\n{self.text}"
        )
        assert text in self.text, self.text

    def wait(self, seconds: float) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not over after {seconds:g} s\n{self.text}") from None

    def interrupt(self) -> None:
        self._rig.send(self.process, signal.SIGINT)

    @property
    def run(self) -> Path:
        """The run's folder."""
        (folder,) = (self._rig.folder / "launch" / "runs").glob("slip-*")
        return folder

    @property
    def record(self) -> dict[str, Any]:
        return json.loads((self.run / "record.json").read_text())


def _verb(rig: Rig, *words: str) -> str:
    return rig.run([_LAUNCH, *words], seconds=60, environ=rig.environ(NO_COLOR="1")).ok()


def _left(rig: Rig) -> list[str]:
    """What still runs of SkyPilot, of ssh and of ours."""
    names = ("sky.server", "SkyPilot:", "sky_calls", "launcher.", "ssh -")
    return [line for line in rig.processes().values() if any(name in line for name in names)]


def test_the_quickstart_learns_on_a_rented_machine_comes_home_and_leaves_nothing(runtime_rig: Rig) -> None:
    rig = runtime_rig
    program = ["--", "python", "examples/quickstart.py", "--steps", str(_STEPS)]
    launched = Launched(rig, [*_RENTED, "--max", "30m", "--name", "demo", *program])
    launched.wait_for("ready: http", 300)
    _the_machine_is_entered(rig, launched)
    assert launched.wait(600) == 0, launched.text
    print(launched.text)

    assert "27.52" in launched.text
    assert "down: verified" in launched.text
    results = launched.run / "results"
    summary = json.loads((results / "summary.json").read_text())
    assert summary["steps"] == _STEPS
    assert summary["rise"] > 0
    assert json.loads((results / "adapter" / "state.json").read_text())["step"] == _STEPS
    assert (results / "logs" / "trainer.log").stat().st_size
    assert len((results / "metrics.jsonl").read_text().splitlines()) == _STEPS
    (run,) = rig.witness("run")
    assert [one["id"] for one in rig.witness("terminate")] == [run["id"]]
    record = launched.record
    assert record["state"] == "verified" and record["proof"]["verified"]
    assert not (rig.home / ".ssh" / "config").exists()
    assert not _left(rig)


def _the_machine_is_entered(rig: Rig, launched: Launched) -> None:
    """By our verbs and by plain ssh, while the run is at work."""
    name = f"ip-{rig.witness('run')[0]['address'].replace('.', '-')}"
    assert name in _verb(rig, "ssh", "demo", "--", "hostname")
    assert "42" in _verb(rig, "exec", "demo", "--", "python", "-c", "import torch; print(6 * 7)")
    assert "$27.52/h" in _verb(rig, "status", "demo")
    assert "supervisor" in _verb(rig, "logs", "demo", "--which", "keeper")
    config = rig.home / ".ssh" / "config"
    assert re.fullmatch(r'Include "\S+/runs/\*/ssh_config"\n', config.read_text())
    plain = ("-F", str(config))
    assert name in rig.run(["ssh", *plain, "demo", "hostname"]).ok()
    rig.run(["scp", *plain, "demo:/etc/hostname", str(rig.folder / "hostname")]).ok()
    assert name in (rig.folder / "hostname").read_text()


def test_no_capacity_in_one_region_is_the_next_one_and_a_failing_setup_leaves_nothing(rig: Rig) -> None:
    rig.faults("no-capacity", " ".join(f"us-east-1{zone}" for zone in "abcdef"))
    launched = Launched(rig, [*_RENTED, "--", "true"])
    assert launched.wait(400) == 6, launched.text
    print(launched.text)
    assert "us-west-2" in launched.text
    assert "setup failed on the machine" in launched.text
    assert "down: verified" in launched.text
    (run,) = rig.witness("run")
    assert run["region"] == "us-west-2"
    assert [one["id"] for one in rig.witness("terminate")] == [run["id"]]
    assert (launched.run / "machine" / "logs" / "setup.log").stat().st_size
    assert not _left(rig)


def test_no_capacity_anywhere_is_exit_4_and_leaves_nothing_behind(rig: Rig) -> None:
    rig.faults("no-capacity", EVERYWHERE)
    launched = Launched(rig, [*_RENTED, "--", "true"])
    assert launched.wait(300) == 4, launched.text
    print(launched.text)
    assert rig.witness("run-refused") and not rig.witness("run")
    assert not _left(rig)


def test_g02_ctrl_c_while_provisioning_ends_the_request_and_the_machine(rig: Rig) -> None:
    launched = Launched(rig, [*_RENTED, "--", "true"])
    wait_until(lambda: rig.witness("run"), 300, f"a machine\n{launched.text}")
    launched.interrupt()
    assert launched.wait(120) == 130, launched.text
    print(launched.text)
    assert not rig.alive()
    assert launched.record["state"] == "verified"
    assert not _left(rig)
