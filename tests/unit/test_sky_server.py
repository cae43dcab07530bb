"""SkyPilot's API server in its private home: what happens to it is ours to handle; nothing of it stays."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from launcher.backends.skypilot import sky_process
from launcher.backends.skypilot.sky_home import SkyHome
from launcher.backends.skypilot.sky_process import SkyProcess
from launcher.base import process_inspection
from launcher.base.errors import LaunchError, PreflightError
from launcher.base.processes import ProcessId
from tests.support.environment import PROGRAMS

StandbyHelper = Callable[..., tuple[subprocess.Popen[bytes], int]]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[SkyHome]:
    (tmp_path / "user" / ".aws").mkdir(parents=True)
    home = SkyHome(tmp_path / "sky", ["aws"], "0123abcd")
    home.make(tmp_path / "user")
    yield home
    home.end_server()


@pytest.fixture
def standby() -> Iterator[StandbyHelper]:
    """A server that looks like SkyPilot's, and its port."""
    started: list[subprocess.Popen[bytes]] = []

    def start(folder: Path, runs: str, installed: str) -> tuple[subprocess.Popen[bytes], int]:
        command = [sys.executable, PROGRAMS / "unit" / "answer_health.py", runs, installed]
        started.append(subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE))
        assert started[-1].stdout is not None
        return started[-1], int(started[-1].stdout.readline())

    yield start
    for one in started:
        one.kill()
        one.wait()


@pytest.mark.process
def test_g25_only_a_server_of_this_home_and_of_the_installed_version_counts(
    home: SkyHome, tmp_path: Path, standby: StandbyHelper
) -> None:
    cases = ((home.folder, "0.14.1", True), (home.folder, "0.13.0", False), (tmp_path, "0.14.1", False))
    for folder, runs, counts in cases:
        process, port = standby(folder, runs, "0.14.1")
        (home.folder / "api-port").write_text(str(port))
        assert home.healthy() == counts, (folder, runs)
        process.kill()
        process.wait()
    assert not home.healthy()


@pytest.mark.slow
def test_g25_a_taken_port_a_frozen_and_a_killed_server_are_ours_to_handle(
    home: SkyHome, tmp_path: Path, standby: StandbyHelper, monkeypatch: pytest.MonkeyPatch
) -> None:
    sky = SkyProcess(home, tmp_path / "skypilot.log")
    _another_takes_the_first_port(home, tmp_path, standby, monkeypatch)
    assert sky.call("down", 300.0, cluster="slip-0123abcd", by_server=True) == {"known": False}

    assert _asked_of_the_server(home) == {"sky.down"}, "none of its standing jobs"

    asks, port = _sky_process(sky), home.port()
    sky.pause_server()
    assert home.processes() == {asks}, "while a machine works nothing else of SkyPilot is there"
    sky.serve()
    assert sky.call("down", 300.0, cluster="slip-0123abcd", by_server=True) == {"known": False}
    assert (_sky_process(sky), home.port()) == (asks, port), "and who was there asks the server that is back"

    frozen = home.processes() - {_sky_process(sky)}
    for process in frozen:
        process.send(signal.SIGSTOP)
    monkeypatch.setattr(sky_process, "_SERVER_STALL_SECONDS", 2.0)
    monkeypatch.setattr(sky_process, "_PROGRESS_SECONDS", 0.0)
    monkeypatch.setattr(sky_process, "_HEALTH_POLL_SECONDS", 0.5)
    said: list[str] = []
    with pytest.raises(PreflightError, match="API server is in trouble") as trouble:
        sky.call("down", 300.0, said.append, cluster="slip-0123abcd", by_server=True)
    assert trouble.value.why and "has not answered" in trouble.value.why
    assert trouble.value.hint == f"less {home.folder / 'api-server.log'}"
    assert any("has not answered" in line for line in said)
    monkeypatch.undo()

    home.serve()
    assert not any(process.alive() for process in frozen)
    assert sky.call("down", 300.0, cluster="slip-0123abcd", by_server=True) == {"known": False}
    before = home.processes()
    os.kill(_listens(home), signal.SIGKILL)
    begun = time.monotonic()
    with pytest.raises(LaunchError) as gone:
        sky.call("down", 300.0, cluster="slip-0123abcd", by_server=True)
    assert gone.value.exit_code == 3 and gone.value.hint
    assert time.monotonic() - begun < 250
    home.end_server()
    sky.end()
    assert not any(process.alive() for process in before)
    assert not home.processes()


def _another_takes_the_first_port(
    home: SkyHome, folder: Path, standby: StandbyHelper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the choice of the port and its use; and it answers as if it were our server."""
    installed = version("skypilot")
    process, taken = standby(folder, installed, installed)
    choose = SkyHome._choose_port
    ports = [taken]

    def first_taken(self: SkyHome) -> int:
        if not ports:
            return choose(self)
        (self.folder / "api-port").write_text(str(ports[0]))
        return ports.pop()

    monkeypatch.setattr(SkyHome, "_choose_port", first_taken)
    home.serve()
    monkeypatch.undo()
    assert home.port() != taken and home.healthy()
    assert process.poll() is None


def _asked_of_the_server(home: SkyHome) -> set[str]:
    """By name; its own standing jobs are requests like any other."""
    (database,) = home.folder.glob(".sky/api_server/requests.db")
    with contextlib.closing(sqlite3.connect(database)) as books:
        return {name for (name,) in books.execute("SELECT name FROM requests")}


def _sky_process(sky: SkyProcess) -> ProcessId:
    assert sky._process is not None
    found = ProcessId.of(sky._process.pid)
    assert found is not None
    return found


def _listens(home: SkyHome) -> int:
    """The pid of the server's own process."""
    (found,) = (one.pid for one in home.processes() if process_inspection.listens(one.pid, home.port()))
    return found
