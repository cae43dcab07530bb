"""The keeper's hold on a rented machine's timer: a real SQLite table as skylet's, a real gateway socket."""

from __future__ import annotations

import contextlib
import functools
import http.server
import socketserver
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from runtime import autodown
from runtime.autodown import AutostopTimer, RuntimeLiveness


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """As skylet makes it (sky/skylet/configs.py)."""
    path = tmp_path / "skylet_config.db"
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("CREATE TABLE config (key TEXT PRIMARY KEY, value TEXT)")
        connection.execute("INSERT INTO config VALUES ('autostop_last_active_time', '1.5')")
        connection.execute("INSERT INTO config VALUES ('autostop_config', 'theirs')")
    return path


def _values(database: Path) -> dict[str, str]:
    with contextlib.closing(sqlite3.connect(database)) as connection:
        return dict(connection.execute("SELECT key, value FROM config"))


class _Well(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/healthz" else 404)
        self.end_headers()

    def address_string(self) -> str:
        return "a Unix socket"

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - the base class's name
        """Quiet."""


@contextlib.contextmanager
def _gateway(folder: Path) -> Iterator[None]:
    with socketserver.ThreadingUnixStreamServer(str(folder / "gateway.sock"), _Well) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield
        server.shutdown()


def test_the_timer_is_set_back_and_nothing_else_is_touched(database: Path) -> None:
    assert autodown.main(["--database", str(database)]) == 0
    values = _values(database)
    assert time.time() - float(values["autostop_last_active_time"]) < 60
    assert values["autostop_config"] == "theirs"


def test_where_nothing_is_armed_no_database_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "none.db"
    assert autodown.main(["--database", str(path)]) == 1
    assert "nothing of SkyPilot's is armed" in capsys.readouterr().err
    assert not path.exists()


def test_g04_the_timer_runs_while_the_runtime_does_not_answer(
    database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autodown, "RENEW_EVERY_SECONDS", 0.0)
    timer = AutostopTimer(database, RuntimeLiveness(tmp_path, tmp_path), lambda: None)
    with _gateway(tmp_path):
        assert timer.tick() == "the machine's timer is reset"
        assert timer.tick() is None  # said once
    assert float(_values(database)["autostop_last_active_time"]) > 2
    autodown.renew(database)
    frozen = _values(database)
    assert timer.tick() == "the machine's timer runs: the gateway does not answer"
    assert _values(database) == frozen


def test_g04_the_timer_is_armed_again_when_the_machines_clock_was_set(
    database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SkyPilot takes a timer of another boot for none: from then on nothing would end the machine."""
    monkeypatch.setattr(autodown, "RENEW_EVERY_SECONDS", 0.0)
    booted, armed = [1000], []
    provision = functools.partial(autodown.rearm, ["/bin/sh", "-c", f"echo armed >> {tmp_path}/armed"])
    timer = AutostopTimer(database, RuntimeLiveness(tmp_path, tmp_path), provision, lambda: booted[0])
    with _gateway(tmp_path):
        for clock in (1000, 1000, 1007, 1007):
            booted[0] = clock
            timer.tick()
            armed.append(len((tmp_path / "armed").read_text().splitlines()))
        broken = functools.partial(autodown.rearm, ["/bin/sh", "-c", "exit 3"])
        said = AutostopTimer(database, RuntimeLiveness(tmp_path, tmp_path), broken).tick()
    assert armed == [1, 1, 2, 2]
    assert said is not None and "is reset, but could not be armed for this boot" in said
    assert abs(autodown.booted_at() - psutil.boot_time()) <= 1


def test_g04_the_timer_runs_while_the_supervisor_is_silent(
    database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autodown, "_HEARTBEAT_SECONDS", 0.0)
    before = _values(database)
    with _gateway(tmp_path):
        said = AutostopTimer(database, RuntimeLiveness(tmp_path, tmp_path), lambda: None).tick()
    assert said is not None and "the supervisor has been silent" in said
    assert _values(database) == before


def test_a_starting_gateway_has_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answering = RuntimeLiveness(tmp_path, tmp_path)
    assert answering.problem() is None
    monkeypatch.setattr(autodown, "_START_SECONDS", 0.0)
    assert answering.problem() == "the gateway does not answer"


def test_the_timer_is_set_back_more_often_than_the_least_that_can_be_armed() -> None:
    assert autodown.RENEW_EVERY_SECONDS <= 60 / 4
