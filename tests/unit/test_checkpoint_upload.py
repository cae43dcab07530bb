"""A run that goes on on a new machine: what is sent there, how, and that the machine waits for it.

The machine is a folder behind a real ssh, with a timer's database as skylet makes it; rsync is the real one.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import sqlite3
from dataclasses import dataclass
from pathlib import Path

import pytest

from launcher.backends.cloud_machine import CloudMachine
from launcher.backends.ssh import timer_reset
from launcher.base.errors import PreflightError
from launcher.base.home import Home
from launcher.base.log import close_log
from launcher.config.setting_sources import load
from launcher.console.output import Output
from launcher.records.records import RecordStore
from launcher.results import checkpoints, durable, results_copy, whole_checkpoints
from launcher.run.resume_point import ResumePoint
from launcher.run.run import Run
from launcher.run.run_request import RunRequest
from launcher.types.plan import make_plan
from runtime.shared.start_adapter_layout import FILES
from tests.support.committed import commit, pin
from tests.support.environment import REPOSITORY
from tests.support.own_sshd import OwnSshd
from tests.support.pretend_machine import PretendMachine

pytestmark = pytest.mark.process

LONG_AGO = 1.5
# Each file of a checkpoint; by the slow rsync so many bytes take three looks at the timer.
LARGE_BYTES = 300_000
SLOW = """#!/bin/sh
echo "$@" >> {log}
case "$*" in *--server*|*--version*) exec {rsync} "$@";; *) exec {rsync} --bwlimit=200 "$@";; esac
"""


@dataclass
class NewMachine:
    """A machine that is armed and has the run's code; the run's `results` are at home."""

    machine: CloudMachine
    results: Path
    state_dir: Path
    database: Path
    sent: Path

    @property
    def active_at(self) -> float:
        """Since when it counts its idle minutes."""
        with contextlib.closing(sqlite3.connect(self.database)) as connection:
            (found,) = connection.execute("SELECT value FROM config WHERE key = 'autostop_last_active_time'")
        return float(found[0])

    def begin_idle(self) -> None:
        with contextlib.closing(sqlite3.connect(self.database)) as connection, connection:
            connection.execute("UPDATE config SET value = ?", (str(LONG_AGO),))


@pytest.fixture
def new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NewMachine:
    monkeypatch.setattr(timer_reset, "EVERY_SECONDS", 0.05)
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "rsync").write_text(SLOW.format(rsync=shutil.which("rsync"), log=tmp_path / "sent"))
    (tools / "rsync").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    sshd = OwnSshd(tmp_path / "sshd")
    store = RecordStore(Home.find({"LAUNCH_HOME": str(tmp_path / "home")}))
    code = sshd.home / "slipway-code" / "runtime"
    code.mkdir(parents=True)
    for name in ("__init__.py", "autodown.py"):
        shutil.copy(REPOSITORY / "runtime" / name, code / name)
    database = sshd.home / ".sky" / "skylet_config.db"
    database.parent.mkdir()
    with contextlib.closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("CREATE TABLE config (key TEXT PRIMARY KEY, value TEXT)")
        connection.execute("INSERT INTO config VALUES ('autostop_last_active_time', ?)", (str(LONG_AGO),))
    record = sshd.rented(store, "dev")
    machine = CloudMachine.from_description(record.machine)
    state_dir = sshd.logs(record).parent
    results = store.folder(record.id) / "results"
    return NewMachine(machine, results, state_dir, database, tmp_path / "sent")


def durable_steps(new: NewMachine, tmp_path: Path, steps: int = 3) -> None:
    """So many steps at home, of which the first two are pinned."""
    old = tmp_path / "old-machine"
    for step in range(1, steps + 1):
        commit(old, step, os.urandom(LARGE_BYTES))
    pin(old, 1, 2)
    (old / "metrics.jsonl").write_text('{"step": 3}\n')
    results_copy.make_durable(old, new.results)


def sha256(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_p02_a_machine_waits_while_a_long_upload_moves_and_progress_is_shown(
    new: NewMachine, tmp_path: Path
) -> None:
    durable_steps(new, tmp_path)
    set_back: list[float] = []
    said: list[str] = []

    def progress(line: str) -> None:
        said.append(line)
        if new.active_at != LONG_AGO:
            set_back.append(new.active_at)
            new.begin_idle()

    assert new.machine.upload_checkpoints(new.results, progress) == 3
    assert len(set_back) >= 3, f"its timer was set back over and over: {said}"
    assert any("step 3 to the machine:" in line and " MB of " in line for line in said)


def test_p02_the_newest_comes_first_and_nothing_is_staged(
    new: NewMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    durable_steps(new, tmp_path)
    (tmp_path / "small").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "small"))
    staged: set[str] = set()
    new.machine.upload_checkpoints(new.results, lambda line: staged.update(os.listdir(tmp_path / "small")))
    assert not staged
    lines = [line for line in new.sent.read_text().splitlines() if "durable/step-" in line]
    assert ["step-000003" in lines[0], "step-000002" in lines[1], "step-000001" in lines[2]] == [True] * 3

    home, there = new.results / "durable", new.state_dir / "checkpoints"
    assert checkpoints.names(there) == ["step-000003", "step-000002", "step-000001"]
    assert checkpoints.pinned(there) == {"step-000001", "step-000002"}
    assert all(sha256(there / name) == sha256(home / name) for name in checkpoints.names(there))
    assert (new.state_dir / "metrics.jsonl").read_text() == '{"step": 3}\n'
    assert '"to_step": 3' in (new.state_dir / "rewound.json").read_text()
    assert not (new.state_dir / durable.UPLOADING).exists()
    weights = there / "step-000003" / "optimizer.safetensors"
    assert weights.stat().st_mode == (home / "step-000003" / "optimizer.safetensors").stat().st_mode


def test_p02_an_upload_whose_connection_breaks_goes_on(new: NewMachine, tmp_path: Path) -> None:
    durable_steps(new, tmp_path, steps=2)
    cut: list[bool] = []

    def progress(line: str) -> None:
        if not any(cut) and "MB of" in line:
            cut.append(OwnSshd.cut(os.getpid()))

    assert new.machine.upload_checkpoints(new.results, progress) == 2
    assert any(cut) and whole_checkpoints.newest_whole_step(new.state_dir / "checkpoints") == 2


def test_p02_what_was_broken_off_leaves_nothing_to_resume_from(new: NewMachine, tmp_path: Path) -> None:
    durable_steps(new, tmp_path)

    def leave(line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        new.machine.upload_checkpoints(new.results, leave)
    assert not (new.state_dir / "checkpoints").exists() and not (new.state_dir / "rewound.json").exists()
    new.machine.upload_checkpoints(new.results)
    assert whole_checkpoints.newest_whole_step(new.state_dir / "checkpoints") == 3


def test_p02_an_adapter_that_a_run_starts_from_is_sent_as_well(new: NewMachine, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for name in FILES:
        (adapter / name).write_text("{}")
    durable.save_initial_adapter(new.results, adapter)
    (new.state_dir / "checkpoints").mkdir()
    assert new.machine.upload_checkpoints(new.results) == 0
    assert sorted(path.name for path in (new.state_dir / "start").iterdir()) == sorted(FILES)
    assert sorted(path.name for path in new.state_dir.iterdir()) == ["logs", "start"]


def test_p02_a_machine_has_its_code_before_anything_is_uploaded(tmp_path: Path) -> None:
    """Before it nothing can set the machine's timer back."""
    home = Home(tmp_path / "home", tmp_path / "config", tmp_path / "cache")
    store = RecordStore(home)
    record = store.create(name="dev", command=("true",))
    record = store.update(record.id, state="verified", launch=None)

    def no_further() -> None:
        raise PreflightError("no further", "the test has seen enough", None)

    machine = PretendMachine(tmp_path / "machine", {"setup": no_further})
    begun = load({}, environ={}, folder=tmp_path, home=home)
    resumed = ResumePoint(record, 3, rewinds=True)
    request = RunRequest(begun, make_plan(begun), "/nowhere", ("true",), resumed=resumed)
    output = Output(stdout=io.StringIO(), stderr=io.StringIO(), environ={})
    assert Run(request, home, output, lambda record, store, home: machine).execute() == 3
    close_log()
    assert machine.calls[:4] == ["arm", "push", "upload_checkpoints", "setup"]
