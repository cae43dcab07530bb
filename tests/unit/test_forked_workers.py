"""Workers that have imported what their server has: forked where multiprocessing would spawn them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from launcher.base import processes
from tests.support.environment import PROGRAMS
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform != "linux", reason="they are spawned on macOS, as SkyPilot has it"),
]

PROGRAM = PROGRAMS / "unit" / "fork_workers.py"


@pytest.fixture
def server() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(PROGRAM)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def told(server: subprocess.Popen[str]) -> dict[str, Any]:
    assert server.stdout is not None
    return json.loads(server.stdout.readline())


def test_a_worker_has_what_was_loaded_before_and_no_file_of_the_server(
    server: subprocess.Popen[str],
) -> None:
    for worker in told(server)["workers"]:
        assert worker["loaded"] and worker["pid"] != server.pid
        assert str(PROGRAM) not in worker["files"]


def test_none_of_them_outlives_a_server_that_has_ended(server: subprocess.Popen[str]) -> None:
    found = told(server)
    left = [processes.ProcessId.of(pid) for pid in (found["server"], found["workers"][0]["pid"])]
    assert all(left)
    assert server.stdin is not None
    server.stdin.close()
    assert server.wait() == 0
    wait_until(
        lambda: not any(one and one.alive() for one in left), what="the fork server and its workers end"
    )
