"""What of ssh and of a remote folder is on this computer: options as ssh reads them, archives unpacked."""

from __future__ import annotations

import fcntl
import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from launcher.backends.ssh.link import SshHost, run_on
from launcher.backends.ssh.remote_folder import RemoteFolder, _unpack
from launcher.backends.ssh.results_download import ResultsDownload
from launcher.base import locks
from launcher.base.errors import JobFailed, NotPulled
from launcher.results import results_copy
from tests.support.environment import PROGRAMS
from tests.support.own_sshd import OwnSshd


@pytest.mark.process
def test_ssh_reads_paths_with_spaces_and_percent_signs_as_they_are(tmp_path: Path) -> None:
    folder = tmp_path / "a home %d"
    host = SshHost("192.0.2.1", "ubuntu", folder / "key", folder / "known hosts")
    said = subprocess.run(
        ["ssh", "-G", *host.options(), host.address], capture_output=True, text=True, check=True
    )
    read = dict(line.split(" ", 1) for line in said.stdout.splitlines())
    assert read["identityfile"].replace("%%", "%") == str(folder / "key")
    assert read["userknownhostsfile"].strip('"').replace("%%", "%") == str(folder / "known hosts")


def test_an_archive_of_a_machine_writes_nothing_outside_its_folder(tmp_path: Path) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name in ("./supervisor.json", "./logs/keeper.log", "../outside", "/absolute"):
            member = tarfile.TarInfo(name)
            member.size = 2
            archive.addfile(member, io.BytesIO(b"{}"))
        link = tarfile.TarInfo("./lease")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    here = tmp_path / "here"
    here.mkdir()
    _unpack(packed.getvalue(), here)
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if not path.is_dir()} == {
        "here/supervisor.json", "here/logs/keeper.log",
    }  # fmt: skip


@pytest.mark.process
def test_g31_results_come_home_below_a_folder_with_a_blank_by_an_rsync_that_splits_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rsync of macOS splits what it is to run at blanks, whatever is quoted; this one does so, too."""
    sshd = OwnSshd(tmp_path / "Application Support" / "slipway", tmp_path / "there")
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "rsync").symlink_to(PROGRAMS / "unit" / "rsync_that_splits.py")
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    there = sshd.home / "state"
    (there / "logs").mkdir(parents=True)
    (there / "logs" / "trainer.log").write_text("step 1\n")
    (there / "metrics.jsonl").write_text("{}\n")
    remote = RemoteFolder(sshd.host(), str(there), tmp_path / "a home" / "machine")
    ResultsDownload(remote).run()
    assert (remote.here / "metrics.jsonl").read_text() == "{}\n"
    assert (remote.here / "logs" / "trainer.log").read_text() == "step 1\n"
    (tmp_path / "a model").mkdir()
    (tmp_path / "a model" / "weights").write_text("w")
    remote.send(tmp_path / "a model")
    assert (there / "weights").read_text() == "w"


@pytest.mark.process
def test_g22_without_rsync_or_ssh_on_this_computer_copying_fails_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = SshHost("192.0.2.1", "ubuntu", tmp_path / "key", tmp_path / "known_hosts")
    monkeypatch.setenv("PATH", str(tmp_path))
    remote = RemoteFolder(host, "/state", tmp_path / "machine")
    with pytest.raises(JobFailed, match="copying needs rsync"):
        remote.send(tmp_path)
    with pytest.raises(JobFailed) as refused:
        remote.shell("true", "look")
    assert refused.value.why == "there is no ssh on this computer"


@pytest.mark.process
def test_g22_a_ctrl_c_at_the_terminal_reaches_no_question_to_a_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the terminal sends goes to all of our group; in the place of ssh is what says its own."""
    ssh = tmp_path / "ssh"
    ssh.write_text(f"#!/bin/sh\nexec {sys.executable} -c 'import os; print(os.getpgrp())'\n")
    ssh.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    host = SshHost("192.0.2.1", "ubuntu", tmp_path / "key", tmp_path / "known_hosts")
    assert int(run_on(host, "true").stdout) != os.getpgrp()


def test_g22_results_are_pulled_on_a_disk_that_locks_only_what_is_open_for_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS: its locks are those of fcntl, which take a file opened for writing."""
    flock = fcntl.flock

    def as_nfs_does(descriptor: int, operation: int) -> None:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(9, "Bad file descriptor")
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", as_nfs_does)
    (tmp_path / "machine").mkdir()
    (tmp_path / "machine" / "metrics.jsonl").write_text("{}\n")
    assert results_copy.pull(tmp_path / "machine", tmp_path / "results").files == 1
    assert sorted(path.name for path in (tmp_path / "results").iterdir()) == ["logs", "metrics.jsonl"]
    # It is a lock all the same.
    monkeypatch.setattr(results_copy, "_PULL_SECONDS", 0.0)
    with locks.exclusive(tmp_path / "results"), pytest.raises(NotPulled, match="could not copy the results"):
        results_copy.pull(tmp_path / "machine", tmp_path / "results")
