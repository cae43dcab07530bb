"""cluster_teardown.py on a full disk: the machine ends all the same, by its provider's own word.

The disk is a real one of 256 KiB, in a mount namespace of its own; in SkyPilot's place is a program that
writes in its home as SkyPilot does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.backends import machine_from_record
from launcher.backends.cloud_machine import CloudMachine
from launcher.backends.skypilot import sky_home
from launcher.backends.skypilot.sky_home import SkyHome
from launcher.types.machine import Proof
from tests.support.environment import PROGRAMS, REPOSITORY

pytestmark = pytest.mark.process

_MOUNT = 'mount -t tmpfs -o size=256k none "$1" && exec "$2" "$3" "$1" "$4"'


@pytest.mark.parametrize("books", ["as they were", "changed"])
def test_g27_a_full_disk_at_home_does_not_keep_a_machine_from_being_ended(tmp_path: Path, books: str) -> None:
    """`changed`: what SkyPilot's books say now is to be kept in the record, which cannot be written."""
    small, folder = tmp_path / "small", tmp_path / "elsewhere"
    small.mkdir()
    folder.mkdir()
    program = PROGRAMS / "unit" / "end_on_full_disk.py"
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), "CHANGED": "1" if books == "changed" else ""}
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", _MOUNT, "sh", small, sys.executable, program, folder],
        capture_output=True,
        text=True,
        timeout=300,
        env=environ,
    )
    if done.returncode and done.stderr.startswith(("unshare:", "mount:")):
        pytest.skip(f"this user may not mount a small disk: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["left"] == [], "the provider lists nothing any more"
    assert said["proof"]["verified"], said["proof"]
    assert "is listed by AWS us-east-1" in said["proof"]["detail"]
    assert said["spare"] == [] and not said["home"], "what was started for it is gone"


def test_g27_a_machine_that_nobody_was_asked_for_is_no_machine_whatever_cannot_be_tidied_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: SkyHome) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(SkyHome, "remove", refuse)
    machine = CloudMachine("slip-0123abcd", tmp_path, infra=["aws"], gpus="H100:4", idle_minutes=10)
    assert machine_from_record.end_machine(machine, lambda trouble: None) == Proof(
        True, "no provider had been asked for anything"
    )


def test_a_home_that_is_made_again_is_not_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = tmp_path / "user"
    (user / ".aws").mkdir(parents=True)
    (user / ".aws" / "credentials").write_text("[default]\n")
    home = SkyHome(tmp_path / "home", ["aws"], "0123abcd")
    home.make(user)

    def refuse(*words: object, **more: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sky_home.Path, "write_text", refuse)
    home.make(user)
