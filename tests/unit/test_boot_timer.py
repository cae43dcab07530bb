"""boot_timer.py and inhibit_sleep.py: a machine's own timer, and a computer that stays awake."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml

from launcher.backends.skypilot import boot_timer
from launcher.backends.skypilot.sky_home import SkyHome
from launcher.base.inhibit_sleep import inhibit_sleep
from launcher.run.summary import Summary
from launcher.types.durability import DurabilityStatus
from launcher.types.machine import Proof
from tests.support.waiting import wait_until


def test_p03_a_machine_of_aws_gets_a_dead_man_at_its_boot_before_the_users_own_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = tmp_path / "user"
    for name in (".aws/credentials", ".lambda_cloud/keys", ".sky/config.yaml"):
        (user / name).parent.mkdir(parents=True)
        (user / name).touch()
    (user / ".sky/config.yaml").write_text(json.dumps({"aws": {"post_provision_runcmd": ["echo mine"]}}))
    monkeypatch.setenv("HOME", str(user))
    home = SkyHome(tmp_path / "sky", ["aws", "lambda"], "0123abcd")
    (dead_man,) = boot_timer.boot_commands("aws", idle_minutes=10)
    home.make(only="aws", boot_commands=[dead_man])
    config = json.loads((home.folder / ".sky/config.yaml").read_text())
    assert config["aws"]["post_provision_runcmd"] == [dead_man, "echo mine"]
    assert "--on-boot=1200 " in dead_man and "shutdown -h now" in dead_man
    # SkyPilot's template puts it into YAML as it stands.
    assert yaml.safe_load(f"runcmd:\n  - {dead_man}\n") == {"runcmd": [dead_man]}
    assert boot_timer.boot_commands("lambda", idle_minutes=10) == []


def test_p03_how_long_the_window_was_is_in_the_summary() -> None:
    said = Summary(
        run_id="slip-0123abcd", name=None, seconds=60.0, cost=1.0, status=None, results=None,
        proof=Proof(True, "nothing is listed"), reason=None, exit_code=0, program_exit_code=0,
        durability=DurabilityStatus(), unarmed_seconds=36.2,
    )  # fmt: skip
    assert "window   36 s from asking for the machine to its own armed timer" in said.text()


@pytest.mark.process
@pytest.mark.parametrize("tool", ["systemd-inhibit", "caffeinate"])
def test_p03_the_computer_is_kept_awake_while_it_matters_and_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str
) -> None:
    script = tmp_path / "bin" / tool
    script.parent.mkdir()
    script.write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/begun\nwhile [ "$1" != cat ]; do shift; done\n'
        f"/bin/cat\n/bin/touch {tmp_path}/over\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(script.parent))
    with inhibit_sleep("a machine is being rented"):
        wait_until((tmp_path / "begun").exists, what="it to hold")
        assert not (tmp_path / "over").exists()
    assert (tmp_path / "over").exists()
    assert ("sleep" in (tmp_path / "begun").read_text()) == (tool == "systemd-inhibit")


def test_p03_without_a_way_to_stay_awake_all_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with inhibit_sleep("a machine is being rented"):
        assert os.environ["PATH"] == str(tmp_path)
