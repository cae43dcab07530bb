"""SkyPilot's API server rests while a machine works: who asked it stays, and the end works without it too.

In the places of SkyPilot's server and of our calls of it are programs that answer as they do; homes, ports,
processes and the teardown are the real ones.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.backends.cloud_machine import CloudMachine
from launcher.backends.skypilot import sky_home
from launcher.backends.skypilot.cluster_request import ClusterRequest
from launcher.backends.skypilot.cluster_teardown import ClusterTeardown
from launcher.backends.skypilot.sky_home import NoServerError, SkyHome
from launcher.backends.skypilot.sky_process import SkyProcess
from launcher.base.processes import ProcessId
from tests.support.environment import PROGRAMS
from tests.support.own_sshd import OwnSshd

pytestmark = pytest.mark.process

STANDING = {
    "provider": {"name": "AWS", "cluster": "slip-0123abcd", "cluster_on_cloud": "slip-0123abcd-0123abcd",
                 "config": {"region": "us-east-1"}},
    "where": "aws/us-east-1", "instance_type": "p5.48xlarge", "price_per_hour": 27.52, "address": "10.0.0.1",
    "ssh": None,
}  # fmt: skip


class Rented:
    """A cluster that is up, with SkyPilot as its launch has left it. `provider` is a folder of machines."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.provider = folder / "provider"
        self.provider.mkdir()
        (self.provider / "i-0123").touch()
        self.home = SkyHome(folder / "run" / "skypilot", ["aws/us-east-1"], "0123abcd")
        self.home.make()
        (self.home.folder / "books.json").write_text(json.dumps(STANDING))
        self.sky = SkyProcess(self.home, folder / "skypilot.log")
        order = ClusterRequest("slip-0123abcd", ["aws/us-east-1"], "H100:4")
        self.teardown = ClusterTeardown(order, lambda: order.infra, self.home, self.sky, lambda found: None)
        self.home.serve()
        self.sky.call("cluster_status", 60.0, cluster="slip-0123abcd")

    @property
    def asks(self) -> ProcessId:
        """The process that SkyPilot is asked through."""
        (own,) = self.sky._own()
        return own

    @property
    def servers_started(self) -> int:
        return len((self.folder / "servers").read_text().splitlines())

    @property
    def ended_by_name(self) -> bool:
        return (self.home.folder / "ended-by-name").exists()

    def ended(self) -> None:
        """Take it down."""
        self.teardown.down(STANDING)
        assert not os.listdir(self.provider)


def _python(folder: Path) -> Path:
    """What is started in the place of this Python; nothing any more where `uninstalled` is."""
    programs = PROGRAMS / "unit"
    script = folder / "python"
    script.write_text(
        f"""#!/bin/sh
        [ -e {folder}/uninstalled ] && exit 1
        case "$3" in
        launcher.backends.skypilot.sky_calls)
            exec {sys.executable} {programs / "answer_sky_calls.py"} {folder}/provider;;
        launcher.backends.skypilot.sky_server)
            echo started >> {folder}/servers
            exec {sys.executable} {programs / "answer_health.py"} 0.14.1 0.14.1 "${{5#--port=}}";;
        esac
        exit 1
        """
    )
    script.chmod(0o700)
    return script


@pytest.fixture
def laptop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a user's home, where SkyPilot is what these tests say."""
    (tmp_path / "user" / ".aws").mkdir(parents=True)
    (tmp_path / "user" / ".aws" / "credentials").write_text("[default]\n")
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    monkeypatch.setattr(sys, "executable", str(_python(tmp_path)))
    return tmp_path


@pytest.fixture
def rented(laptop: Path) -> Iterator[Rented]:
    rented = Rented(laptop)
    yield rented
    rented.sky.end()
    rented.home.end_server()


def test_g25_an_armed_machine_has_no_server_until_its_end(laptop: Path) -> None:
    sshd = OwnSshd(laptop / "there")
    host = sshd.host()
    login = {"user": host.user, "key": str(host.key), "port": host.port, "proxy_command": host.proxy_command}
    (laptop / "provider").mkdir()
    there = {"ssh": login, "where": "lambda/us-east-1"}  # of AWS's its own timer would be read back
    (laptop / "provider.json").write_text(json.dumps(STANDING | there))
    machine = CloudMachine(
        "slip-0123abcd", laptop / "run", infra=["aws/us-east-1"], gpus="H100:4", idle_minutes=10
    )
    (laptop / "run").mkdir()
    try:
        machine.provision()
        (left,) = machine._home.processes()
        assert {left} == machine._sky._own()
        assert (sshd.home / "slipway" / "slip-0123abcd").is_dir(), "it is up"
    finally:
        machine.down()
    assert not os.listdir(laptop / "provider")
    assert machine.proof().verified and not left.alive()


def test_g25_while_a_machine_works_only_the_process_that_asks_is_left(rented: Rented) -> None:
    asks = rented.asks
    assert len(rented.home.processes()) > 1 and rented.home.healthy()
    rented.sky.pause_server()
    assert rented.home.processes() == {asks} and not rented.home.healthy()
    assert rented.teardown.listed(STANDING) == ["i-0123"], "whether it is there is asked without a server"
    assert rented.asks == asks and rented.home.processes() == {asks}


def test_g01_a_machine_is_ended_by_name_without_a_server(rented: Rented) -> None:
    """By the process that has been there since before the machine was."""
    asks, port = rented.asks, rented.home.port()
    rented.sky.pause_server()
    rented.ended()
    assert rented.ended_by_name and rented.servers_started == 1
    assert (rented.asks, rented.home.port()) == (asks, port)
    assert rented.teardown.proof(STANDING).verified
    assert not rented.home.processes() and not rented.home.folder.exists()


def test_g01_a_server_that_answers_ends_it_with_the_launch_it_works_at(rented: Rented) -> None:
    served = rented.home.processes()
    rented.ended()
    assert rented.ended_by_name and rented.home.processes() == served


def test_g01_what_is_left_of_a_server_ends_before_the_machine(
    rented: Rented, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says nothing any more, and may be at work on another machine of this cluster."""
    monkeypatch.setattr(sky_home, "_HEALTH_SECONDS", 0.2)
    for process in rented.home.processes() - {rented.asks}:
        process.send(signal.SIGSTOP)
    rented.ended()
    assert rented.ended_by_name and rented.home.processes() == {rented.asks}
    assert rented.teardown.proof(STANDING).verified


def test_a_port_that_somebody_has_taken_meanwhile_is_left_to_them(rented: Rented) -> None:
    rented.sky.pause_server()
    port = rented.home.port()
    with socket.socket() as others:
        others.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        others.bind(("127.0.0.1", port))
        others.listen()
        rented.sky.serve()
    assert rented.home.healthy() and rented.home.port() != port


def test_g27_without_skypilot_a_machine_is_ended_by_who_was_there_before(rented: Rented) -> None:
    """In mid-run SkyPilot was taken off this computer: nothing of it starts any more."""
    asks = rented.asks
    rented.sky.pause_server()
    (rented.folder / "uninstalled").touch()
    with pytest.raises(NoServerError):
        rented.sky.serve(5.0)
    rented.ended()
    assert rented.asks == asks
    assert rented.teardown.proof(STANDING).verified
