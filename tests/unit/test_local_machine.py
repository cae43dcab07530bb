"""local_machine.py with real processes. That it serves is tested end to end, on the real engine."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.backends.local_machine import LocalMachine
from launcher.backends.machine_from_record import NoMachine, from_record
from launcher.base import processes
from launcher.base.errors import NotStarted, PreflightError
from launcher.base.home import Home
from launcher.records.records import RUN_VARIABLE, RecordStore
from runtime.shared.runtime_config import RuntimeConfig
from tests.support.environment import PROGRAMS
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture
def store(tmp_path: Path) -> RecordStore:
    return RecordStore(Home(tmp_path, tmp_path, tmp_path))


@pytest.fixture
def machine(store: RecordStore, tmp_path: Path) -> Iterator[LocalMachine]:
    run_id = store.create().id

    def keep(description: dict[str, Any]) -> None:
        store.update(run_id, machine=description)

    machine = LocalMachine(run_id, store.folder(run_id) / "machine", tmp_path / "environments", keep=keep)
    keep(machine.describe())
    yield machine
    machine.down()


def _config(machine: LocalMachine) -> RuntimeConfig:
    return RuntimeConfig(
        run_id="overwritten",
        model_path="/nowhere",
        state_dir=machine.state_dir,
        socket_dir=machine.socket_dir,
    )


def test_its_folders_are_this_users_alone_and_short_enough_for_sockets(machine: LocalMachine) -> None:
    machine.provision()

    for folder in (machine.state_dir, machine.socket_dir):
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    assert len(f"{machine.socket_dir}/engine-00.sock") < 104


def test_a_long_temporary_folder_is_not_used_for_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("long" * 20)))
    assert LocalMachine("slip-01234567", tmp_path, tmp_path).socket_dir == "/tmp/slip-01234567"


def test_a_socket_folder_that_others_can_enter_is_refused(machine: LocalMachine) -> None:
    Path(machine.socket_dir).mkdir(mode=0o777)
    Path(machine.socket_dir).chmod(0o777)
    with pytest.raises(PreflightError, match="other users can access it"):
        machine.provision()


def test_only_the_runtime_is_on_the_path_and_without_its_model(machine: LocalMachine) -> None:
    machine.provision()
    machine.push()

    code = Path(machine.state_dir) / "code"
    assert [path.name for path in code.iterdir()] == ["runtime"]
    assert (code / "runtime" / "keeper.py").exists() and not list(code.rglob("*.safetensors"))


def test_too_little_disk_is_said_before_anything_is_downloaded(
    machine: LocalMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.bootstrap.NEEDED_BYTES", {"cpu": 10**18})
    machine.provision()
    with pytest.raises(PreflightError, match="GB of disk"):
        machine.setup()


def test_a_runtime_that_cannot_start_is_said_at_once_with_the_reason(
    machine: LocalMachine, store: RecordStore
) -> None:
    machine.provision()
    machine.push()
    machine._python = Path(sys.executable)  # an environment without vLLM: the engine cannot be imported
    said: list[str] = []
    begun = time.monotonic()
    with pytest.raises(NotStarted, match=r"did not start|ended while it started") as failed:
        machine.serve(_config(machine), "a-canary-of-a-token", said.append)

    assert time.monotonic() - begun < 120
    assert failed.value.exit_code == 3, "no program ran"
    assert failed.value.why and "launch logs slip-" in str(failed.value.hint)
    assert any("starting" in line for line in said)
    # What another process would need to end it has been on record since before the wait.
    assert store.list()[0].machine["keeper"]["pid"]
    machine.down()
    assert machine.proof().verified
    written = [
        path.read_text(errors="replace") for path in Path(machine.state_dir).rglob("*") if path.is_file()
    ]
    assert not any("a-canary" in text for text in written)


def test_down_in_another_process_ends_all_and_may_be_repeated(
    machine: LocalMachine, store: RecordStore
) -> None:
    machine.provision()
    environ = {**os.environ, RUN_VARIABLE: machine.describe()["run_id"]}
    for _ in range(2):
        subprocess.Popen(["sleep", "600"], env=environ, start_new_session=True)
    assert not machine.proof().verified and "still run" in machine.proof().detail

    command = [sys.executable, PROGRAMS / "unit" / "take_down_twice.py", store.path(store.list()[0].id)]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "True" and machine.proof().verified
    assert not Path(machine.socket_dir).exists()


def test_the_keeper_is_told_first_and_has_time_to_end_the_rest(machine: LocalMachine, tmp_path: Path) -> None:
    machine.provision()
    ready, how = tmp_path / "ready", tmp_path / "how"
    command = [sys.executable, PROGRAMS / "unit" / "wait_for_signal.py", ready, "TERM", "0", how]
    keeper = subprocess.Popen(command, start_new_session=True)
    wait_until(ready.exists, what="the keeper waits")
    named = processes.ProcessId.of(keeper.pid)
    assert named is not None
    described = machine.describe() | {"keeper": {"pid": named.pid, "started": named.started}}
    LocalMachine.from_description(json.loads(json.dumps(described))).down()

    assert keeper.wait(timeout=120) == 0 and how.read_text() == "in order"


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (None, "its keeper was killed"),
        ('{"state": "running", "reason": null}', "its keeper was killed"),
        ('{"state": "ended", "reason": "lease"}', "its lease was not renewed"),
    ],
)
def test_a_runtime_that_ended_by_itself_says_why(
    machine: LocalMachine, written: str | None, said: str
) -> None:
    machine.provision()
    keeper = subprocess.Popen(["sleep", "600"])
    named = processes.ProcessId.of(keeper.pid)
    assert named is not None and machine.ended() is None
    described = machine.describe() | {"keeper": {"pid": named.pid, "started": named.started}}
    running = LocalMachine.from_description(described)
    assert running.ended() is None
    keeper.kill()
    keeper.wait()
    if written is not None:
        (Path(machine.state_dir) / "keeper.json").write_text(written)
    assert running.ended() == said


def test_a_keeper_whose_pid_is_someone_elses_now_is_left_alone(machine: LocalMachine) -> None:
    machine.provision()
    stranger = subprocess.Popen(["sleep", "600"])
    described = machine.describe() | {"keeper": {"pid": stranger.pid, "started": "long ago"}}
    other = LocalMachine.from_description(described)
    other.down()
    assert other.proof().verified and stranger.poll() is None
    stranger.kill()
    stranger.wait()


def test_a_run_that_ended_before_it_had_a_machine_is_down(store: RecordStore) -> None:
    machine = from_record(store.create())
    machine.down()
    assert isinstance(machine, NoMachine) and machine.proof().verified
