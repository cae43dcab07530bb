"""Plain ssh to a run: one Include line in the user's file, read by the real ssh; gone with the last run."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.backends.ssh import ssh_config
from launcher.backends.ssh.link import SshHost
from tests.support.environment import PROGRAMS
from tests.support.waiting import wait_until


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    return home


def _run(tmp_path: Path, run_id: str, name: str) -> Path:
    folder = tmp_path / "my runs" / run_id
    folder.mkdir(parents=True)
    host = SshHost("10.0.0.7", "ubuntu", folder / "a key", folder / "known_hosts", port=2222)
    ssh_config.write(folder, host, [run_id, name])
    return folder


@pytest.mark.skipif(shutil.which("ssh") is None, reason="no ssh")
def test_ssh_finds_a_run_by_its_id_and_its_name(tmp_path: Path, home: Path) -> None:
    folder = _run(tmp_path, "slip-0123abcd", "demo")
    assert ssh_config.include(folder.parent)
    for name in ("slip-0123abcd", "demo"):
        said = subprocess.run(
            ["ssh", "-G", "-F", home / ".ssh" / "config", name], capture_output=True, text=True, check=True
        ).stdout.splitlines()
        assert {"hostname 10.0.0.7", "user ubuntu", "port 2222", f"identityfile {folder / 'a key'}"} <= set(
            said
        )
        assert f"userknownhostsfile {folder / 'known_hosts'}" in said


def test_the_line_is_first_once_and_goes_with_the_last_run(tmp_path: Path, home: Path) -> None:
    config = home / ".ssh" / "config"
    config.parent.mkdir()
    theirs = "Host work\n  User me\n"
    config.write_text(theirs)
    one, other = _run(tmp_path, "slip-00000001", "one"), _run(tmp_path, "slip-00000002", "other")
    assert ssh_config.include(one.parent)
    assert not ssh_config.include(one.parent)
    assert config.read_text() == f'Include "{one.parent}/*/ssh_config"\n{theirs}'
    ssh_config.forget(one)
    assert ssh_config.included(one.parent)
    ssh_config.forget(other)
    assert config.read_text() == theirs


def test_a_file_that_was_made_for_the_line_goes_with_it(tmp_path: Path, home: Path) -> None:
    folder = _run(tmp_path, "slip-0123abcd", "demo")
    ssh_config.include(folder.parent)
    assert (home / ".ssh" / "config").stat().st_mode & 0o777 == 0o600
    ssh_config.forget(folder)
    assert not (home / ".ssh" / "config").exists()


def test_without_the_line_nothing_of_the_users_is_touched(tmp_path: Path, home: Path) -> None:
    ssh_config.forget(_run(tmp_path, "slip-0123abcd", "demo"))
    assert not (home / ".ssh").exists()


def test_a_configuration_that_is_no_utf8_comes_back_byte_for_byte(tmp_path: Path, home: Path) -> None:
    config = home / ".ssh" / "config"
    config.parent.mkdir()
    theirs = b"# caf\xe9\nHost work\n"
    config.write_bytes(theirs)
    folder = _run(tmp_path, "slip-0123abcd", "demo")
    assert ssh_config.include(folder.parent) and ssh_config.included(folder.parent)
    assert config.read_bytes().endswith(theirs)
    ssh_config.forget(folder)
    assert config.read_bytes() == theirs


@pytest.mark.skipif(shutil.which("ssh") is None, reason="no ssh")
def test_g15_ssh_reads_the_key_and_the_pinned_host_key_below_a_folder_with_a_percent_sign(
    tmp_path: Path, home: Path
) -> None:
    """One writer of ssh's options, for our own ssh and for the user's: what one escapes the other does."""
    folder = tmp_path / "100%d of it" / "slip-0123abcd"
    folder.mkdir(parents=True)
    host = SshHost("10.0.0.7", "ubuntu", folder / "key", folder / "known_hosts")
    ssh_config.write(folder, host, ["demo"])
    words = (["-F", str(folder / "ssh_config"), "demo"], [*host.options(), host.address])
    for options in words:
        done = subprocess.run(["ssh", "-G", *options], capture_output=True, text=True, check=True)
        said = dict(line.partition(" ")[::2] for line in done.stdout.splitlines())
        assert said["identityfile"].replace("%%", "%") == str(folder / "key")
        assert said["userknownhostsfile"].strip('"').replace("%%", "%") == str(folder / "known_hosts")
        assert said["hostname"] == "10.0.0.7"


@pytest.mark.process
def test_runs_of_two_homes_that_begin_and_end_at_once_keep_the_users_file_whole(
    tmp_path: Path, home: Path
) -> None:
    """The lock is the file's, not a home's."""
    config = home / ".ssh" / "config"
    config.parent.mkdir()
    theirs = "".join(f"Host work-{number}\n  User me\n" for number in range(2000))
    config.write_text(theirs)
    begun = [
        subprocess.Popen([sys.executable, PROGRAMS / "unit" / "include_and_forget.py", tmp_path / name, "40"])
        for name in ("one", "other")
    ]
    for process in begun:
        wait_until(lambda process=process: process.poll() is not None, what="both are done")
        assert process.returncode == 0
    assert config.read_text() == theirs
