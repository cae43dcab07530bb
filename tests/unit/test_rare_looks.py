"""What is asked again and again is asked rarely: the clock of these tests moves when somebody waits."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from launcher.backends.cloud_machine import CloudMachine
from launcher.backends.skypilot import sky_home
from launcher.backends.skypilot.sky_home import SkyHome
from launcher.backends.ssh import remote_folder
from launcher.backends.ssh.link import SshHost
from launcher.backends.ssh.remote_folder import RemoteFolder
from launcher.base import locks, processes
from launcher.base.processes import ProcessId


class Clock:
    """Stands in for `time` in one module."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


class Looked(RemoteFolder):
    """A machine's folder; the connections to all of them are counted, none is made."""

    connections = 0

    def shell(self, *asked: object, **how: object) -> bytes:
        Looked.connections += 1
        packed = io.BytesIO()
        tarfile.open(fileobj=packed, mode="w").close()
        return packed.getvalue()


def _looked(folder: Path) -> Looked:
    Looked.connections = 0
    return Looked(SshHost("192.0.2.1", "ubuntu", folder / "key", folder / "known_hosts"), "/state", folder)


def test_g23_a_runtime_that_takes_its_time_is_looked_at_every_five_seconds(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look is an ssh connection of its own; it renews the lease, which is 15 s at least."""
    monkeypatch.setattr(remote_folder, "time", clock)
    there, longest, last = _looked(tmp_path), 0.0, clock.now
    for _ in range(600 * 5):
        before = there.connections
        there.refresh()
        if there.connections > before:
            longest, last = max(longest, clock.now - last), clock.now
        clock.sleep(0.2)
    assert there.connections <= 600 / 5 + 4, "it was one a second"
    assert longest <= 15 / 2


def test_g23_a_machine_that_is_asked_for_its_end_all_the_time_is_asked_rarely(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_folder, "time", clock)
    there = _looked(tmp_path)
    monkeypatch.setattr("launcher.backends.ssh.remote_machine.RemoteFolder", Looked)
    login = {"user": "u", "key": str(tmp_path / "key"), "port": 22, "proxy_command": None}
    described = {
        "run_id": "slip-0123abcd", "folder": str(tmp_path), "infra": ["aws"], "gpus": "H100:1",
        "idle_minutes": 10, "disk_gb": None, "variant": "cpu", "asked": False,
        "standing": {"ssh": login, "address": "192.0.2.1", "price_per_hour": 0.0},
    }  # fmt: skip
    machine = CloudMachine.from_description(described)
    machine._there._user_home = "/home/u"
    for _ in range(60 * 4):
        assert machine.ended() is None
        clock.sleep(0.25)
    assert there.connections <= 60 / 5 + 4, "it was a new one each time"


def test_what_will_not_end_is_looked_for_ever_more_rarely(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "time", clock)
    deaf = ProcessId(os.getppid(), "nobody's")
    monkeypatch.setattr(processes, "tree", lambda roots: {deaf})
    looks: list[float] = []
    assert processes.end(lambda: looks.append(clock.now) or {deaf}, 50.0) == {deaf}
    assert len(looks) <= 55 / 0.25 + 10, "each reads what every process of the computer says of itself"
    assert looks[1] - looks[0] < 0.05, "the first end is seen at once"


def test_a_server_that_starts_is_looked_at_once_a_second(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sky_home, "time", clock)
    looks: list[float] = []
    monkeypatch.setattr(SkyHome, "healthy", lambda self: bool(looks.append(clock.now)))
    monkeypatch.setattr(SkyHome, "end_server", lambda self, spared: None)
    monkeypatch.setattr(
        sky_home.subprocess, "Popen", lambda *words, **how: SimpleNamespace(poll=lambda: None)
    )
    (tmp_path / "sky").mkdir()
    home = SkyHome(tmp_path / "sky", ["aws"], "0123abcd")
    assert home._start_server(90.0, frozenset()) == "no answer in 90 s"
    assert len(looks) <= 90 + 10, "it was ten times a second"


def test_g22_whoever_copies_for_long_is_waited_for_and_whoever_stands_still_is_not(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "time", clock)
    folder = tmp_path / "machine"
    with locks.exclusive(folder) as held:
        left = 5

        def sleep(seconds: float) -> None:
            nonlocal left
            clock.now += 50.0  # of the sixty that a holder may be silent
            if left:
                left -= 1
                os.utime(held._descriptor, (left, left))
                held.touch()

        monkeypatch.setattr(clock, "sleep", sleep)
        begun = clock.now
        with pytest.raises(TimeoutError, match="60 s"), locks.exclusive(folder, 60.0):
            pytest.fail("not reached")
    assert clock.now - begun >= 5 * 50.0 + 60.0
