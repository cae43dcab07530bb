"""`launch logs` and `launch exec` of a rented machine, through the real ssh (remote_verbs.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.backends.ssh.link import SshHost
from launcher.backends.ssh.remote_log import RemoteLog
from launcher.base.errors import JobFailed
from launcher.base.home import Home
from launcher.records.records import RecordStore
from tests.support.own_sshd import OwnSshd
from tests.support.typed import Typed
from tests.support.waiting import wait_until

pytestmark = pytest.mark.process


@pytest.fixture
def sshd(tmp_path: Path) -> OwnSshd:
    return OwnSshd(tmp_path / "sshd")


@pytest.fixture
def store(tmp_path: Path) -> RecordStore:
    return RecordStore(Home.find({"LAUNCH_HOME": str(tmp_path / "home")}))


@pytest.fixture
def following(tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """What follows a log; it is ended with the test."""
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


def _follow(tmp_path: Path) -> subprocess.Popen[bytes]:
    words = ["logs", "dev", "--which", "trainer", "--follow"]
    return subprocess.Popen(
        [sys.executable, "-m", "launcher.cli.main", *words],
        env={**os.environ, "LAUNCH_HOME": str(tmp_path / "home")},
        stdin=subprocess.DEVNULL,
        stdout=(tmp_path / "shown").open("wb"),
    )


def test_g17_a_log_is_followed_through_lost_connections_each_byte_once(
    sshd: OwnSshd, store: RecordStore, tmp_path: Path, following: list[subprocess.Popen[bytes]]
) -> None:
    record = sshd.rented(store, "dev")
    log = sshd.logs(record) / "trainer.log"
    log.write_text("step 1 é\n")
    shown = tmp_path / "shown"
    follower = _follow(tmp_path)
    following.append(follower)
    wait_until(lambda: "step 1" in shown.read_text(), what="the log is shown")
    for step in (2, 3):
        assert sshd.cut(follower.pid)
        with log.open("a") as file:
            file.write(f"step {step} é\n")
        wait_until(lambda step=step: f"step {step}" in shown.read_text(), what=f"step {step} is shown")
    store.update(record.id, state="verified")
    assert follower.wait(timeout=120) == 0
    assert shown.read_text() == log.read_text()


def test_g17_a_connection_that_is_not_to_be_had_again_is_6_and_not_the_end_of_the_log(tmp_path: Path) -> None:
    gone = SshHost("machine", "nobody", tmp_path / "key", tmp_path / "known_hosts", proxy_command="false")
    for follow in (True, False):
        with pytest.raises(JobFailed) as lost:
            RemoteLog(gone, "trainer.log", follow, lambda: "up", "launch logs dev").show(lost_seconds=0)
        assert lost.value.exit_code == 6 and lost.value.hint == "launch logs dev"
    RemoteLog(gone, "trainer.log", True, lambda: "going", "launch logs dev").show(lost_seconds=0)


def test_a_log_that_is_not_followed_is_shown_to_its_end(
    sshd: OwnSshd, store: RecordStore, tmp_path: Path
) -> None:
    record = sshd.rented(store, "dev")
    (sshd.logs(record) / "trainer.log").write_text("step 1\nno end of line")
    done = Typed(tmp_path / "project", tmp_path / "home")("logs", "dev", "--which", "trainer")
    assert (done.returncode, done.stdout) == (0, "step 1\nno end of line")


@pytest.mark.parametrize("form", ["runtime.py", "runtime/__init__.py"])
def test_g11_a_program_beside_a_runtime_of_its_own_is_refused_by_name_on_a_machine_too(
    form: str, sshd: OwnSshd, store: RecordStore, tmp_path: Path
) -> None:
    record = sshd.rented(store, "dev")
    (sshd.home / "slipway" / record.id / "python").write_text(sys.executable)
    ours, mine = sshd.home / "slipway-code", sshd.home / "mine"
    for package in (ours / "runtime", mine):
        package.mkdir(parents=True)
    (ours / "runtime" / "__init__.py").touch()
    for place in (ours, mine):
        (place / "x.py").write_text("import runtime; print(runtime.__file__)")
    typed = Typed(tmp_path / "project", tmp_path / "home")
    assert typed("exec", "dev", "--", "python3", str(mine / "x.py")).returncode == 0
    assert typed("exec", "dev", "--", "python3", "x.py").returncode == 0
    (mine / form).parent.mkdir(exist_ok=True)
    (mine / form).touch()
    done = typed("exec", "dev", "--", "python3", str(mine / "x.py"))
    assert done.returncode == 3
    what, _, hint = done.stderr.splitlines()
    hiding = str((mine / form).parent if "/" in form else mine / form)
    assert what == f"Error: {hiding} hides the package runtime that comes with launch"
    assert hint.startswith(f"Hint: mv {hiding} {mine}/my_runtime")
