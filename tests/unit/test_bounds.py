"""G23: each thing that `launch` waits for, frozen in turn: a message soon, and an end."""

from __future__ import annotations

import fcntl
import functools
import io
import json
import os
import re
import shutil
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.backends import environments, runtime_start
from launcher.backends.local_machine import LocalMachine
from launcher.backends.runtime_start import RuntimeStart
from launcher.base import locks
from launcher.base.errors import NotStarted, PreflightError
from launcher.base.home import Home
from launcher.base.processes import ProcessId
from launcher.base.unix_http import get_json
from launcher.console import output
from launcher.console.output import Output
from launcher.records.records import RecordStore
from launcher.results import results_copy
from launcher.teardown import guardian
from runtime import bootstrap, health, supervision
from tests.support.typed import Typed
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

# What a person may have to wait for the first word about something that hangs.
A_MESSAGE_SECONDS = 30.0


@pytest.fixture
def silent_index() -> Iterator[str]:
    """A package index that accepts connections and says nothing."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(64)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/simple"


def test_g23_a_package_index_that_says_nothing_is_said_before_anything_starts(
    silent_index: str, tmp_path: Path
) -> None:
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "UV_CACHE_DIR": str(tmp_path / "cache")}
    environ |= {"UV_DEFAULT_INDEX": silent_index, "UV_NO_CONFIG": "1"}
    begun = time.monotonic()
    (tmp_path / "cpu.txt").write_text("slipway-nowhere==1.0\n")
    trouble = environments.why_unreachable(requirements=tmp_path, environ=environ, bound_seconds=1.0)
    assert time.monotonic() - begun < 25
    assert trouble == "the package index did not answer in 1 s"
    assert environments.INDEX_SECONDS < A_MESSAGE_SECONDS


def test_g23_an_index_that_falls_silent_while_it_installs_is_said_and_bounded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """uv in its place is a program that says one thing and then nothing, for ever."""
    assert bootstrap._PROGRESS_SECONDS < A_MESSAGE_SECONDS
    monkeypatch.setattr(bootstrap, "_PROGRESS_SECONDS", 0.2)
    said: list[str] = []
    program = ["sh", "-c", "echo Resolved 3 packages $$; exec sleep 600"]
    with pytest.raises(bootstrap.BootstrapError, match="uv did not finish within"):
        bootstrap._uv(program, tmp_path, said.append, dict(os.environ), 1.0)
    assert said[0].startswith("Resolved 3 packages")
    assert any("printed nothing for" in line for line in said)
    assert ProcessId.of(int(said[0].split()[-1])) is None, "and it was ended"


@pytest.fixture
def frozen_gateway(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A gateway's socket that accepts and says nothing; each question's own bound is shortened."""
    monkeypatch.setattr(runtime_start, "get_json", functools.partial(get_json, timeout_seconds=0.2))
    folder = Path(tempfile.mkdtemp(prefix="frozen-"))
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "gateway.sock"))
        listening.listen(64)
        yield folder / "gateway.sock"
    shutil.rmtree(folder)


def test_g23_a_runtime_that_never_gets_ready_says_what_it_waits_for_and_ends(
    frozen_gateway: Path, tmp_path: Path
) -> None:
    child = {"name": "engine-0", "state": "starting", "pid": 1, "restarts": 0, "detail": None}
    (tmp_path / "supervisor.json").write_text(json.dumps({"phase": "starting", "children": [child]}))
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "engine-0.log").write_text("loading weights\n")
    said: list[str] = []
    waiting = RuntimeStart("slip-01234567", tmp_path, frozen_gateway, said.append)
    with pytest.raises(NotStarted, match="the runtime was not ready after") as failed:
        waiting.wait("token", lambda: None, 0.3)
    assert said[0] == "engine-0: starting"
    assert failed.value.why == "loading weights"
    assert failed.value.hint == "launch logs slip-01234567 --which engine-0"


@pytest.mark.parametrize("as_json", [False, True])
def test_g23_a_phase_that_takes_long_says_so_without_a_terminal(
    as_json: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert output.QUIET_SECONDS < A_MESSAGE_SECONDS
    monkeypatch.setattr(output, "QUIET_SECONDS", 0.05)
    stdout, stderr = io.StringIO(), io.StringIO()
    shown = Output(as_json=as_json, stdout=stdout, stderr=stderr, environ={})
    stream = stdout if as_json else stderr
    with shown.phase("serve") as progress:
        progress("engine-0: starting")
        wait_until(lambda: "engine-0: starting" in stream.getvalue(), what="it is said")
    if not as_json:
        assert "serve" in stderr.getvalue().splitlines()[0]
        return
    waiting = next(
        item for item in map(json.loads, stdout.getvalue().splitlines()) if item["state"] == "waiting"
    )
    assert set(waiting) == {"schema", "event", "phase", "state", "seconds", "detail"}
    assert waiting["detail"] == "engine-0: starting"


def test_g23_an_engine_that_stands_still_behind_its_http_side_is_said_soon() -> None:
    """At worst its counters moved just before: a look at rest, one that sees no more of it, a token awaited.

    The test with a frozen engine is in tests/runtime/test_runtime.py.
    """
    looks_seconds = 2 * (health.EngineHealth.POLL_SECONDS + health.ANSWER_SECONDS / 10)
    assert supervision.SLOW_SECONDS < supervision.MAX_SLOW_SECONDS
    assert looks_seconds + supervision.MAX_SLOW_SECONDS < A_MESSAGE_SECONDS - 5


def test_g23_a_guardian_that_does_not_answer_stops_the_launch_and_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert guardian._START_SECONDS < A_MESSAGE_SECONDS
    monkeypatch.setattr(guardian, "_START_SECONDS", 1.0)
    frozen = tmp_path / "python"
    frozen.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 600\n")
    frozen.chmod(frozen.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(guardian.sys, "executable", str(frozen))
    record = tmp_path / "record.json"
    with pytest.raises(PreflightError, match="the run's guardian did not start") as failed:
        guardian.start(record)
    assert failed.value.why == "nothing was started"
    assert ProcessId.of(int((tmp_path / "pid").read_text())) is None


def test_g23_a_lock_whose_holder_is_stopped_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert locks.OWNER_SECONDS < A_MESSAGE_SECONDS
    monkeypatch.setattr(locks, "OWNER_SECONDS", 0.3)
    store = RecordStore(Home(tmp_path, tmp_path, tmp_path))
    record = store.create(name="dev")
    with (store.folder(record.id) / ".lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError, match=r"is a launch stopped \(Ctrl-Z\)"):
            store.update(record.id, state="arm")
    assert store.update(record.id, state="arm").state == "arm"


def test_g23_a_pull_that_waits_for_another_says_so_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert output.QUIET_SECONDS < A_MESSAGE_SECONDS
    monkeypatch.setattr(output, "QUIET_SECONDS", 0.1)
    monkeypatch.setattr(results_copy, "_PULL_SECONDS", 0.5)
    typed = Typed(tmp_path / "project", tmp_path / "home")
    store = RecordStore(Home.find({"LAUNCH_HOME": str(typed.home)}))
    record = store.create(name="dev")
    machine = LocalMachine(record.id, store.folder(record.id) / "machine", tmp_path / "environments")
    store.update(record.id, machine=machine.describe())
    results = store.folder(record.id) / "results"
    results.mkdir()
    with locks.exclusive(results):
        done = typed("pull", "dev")
    assert done.returncode == 8
    assert re.match(r"copying the results of dev, 0\.\d s · or waiting for another pull", done.stderr)
    assert "another process has held the lock" in done.stderr
    assert typed("pull", "dev").returncode == 0


def test_g23_a_lock_is_had_as_soon_as_it_is_let_go(tmp_path: Path) -> None:
    store = RecordStore(Home(tmp_path, tmp_path, tmp_path))
    record = store.create(name="dev")
    held = (store.folder(record.id) / ".lock").open("a")
    fcntl.flock(held, fcntl.LOCK_EX)
    threading.Timer(0.2, held.close).start()
    assert store.update(record.id, state="arm").state == "arm"
