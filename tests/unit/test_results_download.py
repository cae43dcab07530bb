"""launcher/backends/ssh/results_download.py over a real ssh: what comes home, in which order, how fast."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.backends.cloud_machine import CloudMachine
from launcher.backends.ssh import remote_staging, results_download
from launcher.backends.ssh.copy_rate import CopyRate
from launcher.backends.ssh.remote_folder import SSH_BY_FILE, RemoteFolder
from launcher.backends.ssh.remote_results import RemoteResults
from launcher.backends.ssh.results_download import ResultsDownload
from launcher.base.errors import JobFailed, LaunchError, NotPulled
from launcher.base.home import Home
from launcher.records.records import RecordStore
from launcher.results import checkpoints, durable, whole_checkpoints
from launcher.results.checkpoints import Best
from launcher.types.machine import never_stopped, no_progress
from tests.support.committed import commit, name_best, pin
from tests.support.own_sshd import OwnSshd

pytestmark = pytest.mark.process


@pytest.fixture
def remote(tmp_path: Path) -> RemoteFolder:
    """A run's folder on a machine, which is another folder here."""
    sshd = OwnSshd(tmp_path / "sshd")
    there = sshd.home / "state"
    (there / "logs").mkdir(parents=True)
    (there / "logs" / "trainer.log").write_text("step 1\n")
    (there / "metrics.jsonl").write_text('{"step": 1}\n')
    return RemoteFolder(sshd.host(), str(there), tmp_path / "home" / "machine")


@pytest.fixture
def there(remote: RemoteFolder) -> Path:
    return Path(remote.there)


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _same(remote: RemoteFolder, there: Path, name: str) -> bool:
    return _files(remote.here / "checkpoints" / name) == _files(there / "checkpoints" / name)


def test_g22_the_newest_and_the_pinned_checkpoints_come_home_and_no_other(
    remote: RemoteFolder, there: Path
) -> None:
    for step in (1, 2, 3, 4):
        commit(there, step)
    pin(there, 2)
    ResultsDownload(remote).run()
    assert checkpoints.names(remote.here / "checkpoints") == ["step-000004", "step-000002"]
    assert _same(remote, there, "step-000004") and _same(remote, there, "step-000002")
    assert checkpoints.pinned(remote.here / "checkpoints") == {"step-000002"}
    assert (remote.here / "logs" / "trainer.log").read_text() == "step 1\n"
    commit(there, 5)
    ResultsDownload(remote).run()
    assert checkpoints.names(remote.here / "checkpoints") == ["step-000005", "step-000002"]


def test_g20_where_the_newest_is_not_whole_the_one_before_comes_as_well(
    remote: RemoteFolder, there: Path
) -> None:
    for step in (1, 2, 3):
        commit(there, step)
    (there / "checkpoints" / "step-000003" / "optimizer.safetensors").write_bytes(b"cut")
    ResultsDownload(remote).run()
    assert checkpoints.names(remote.here / "checkpoints") == ["step-000003", "step-000002"]
    assert whole_checkpoints.newest_whole(remote.here / "checkpoints") == "step-000002"
    shutil.rmtree(there / "checkpoints" / "step-000002")
    shutil.rmtree(there / "checkpoints" / "step-000001")
    ResultsDownload(remote).run()
    assert whole_checkpoints.newest_whole(remote.here / "checkpoints") is None


def test_g20_a_step_that_was_taken_again_replaces_its_namesake_of_the_same_size(
    remote: RemoteFolder, there: Path
) -> None:
    before = commit(there, 1)
    for path in before.rglob("*"):
        os.utime(path, (1e9, 1e9))
    ResultsDownload(remote).run()
    shutil.rmtree(before)
    commit(there, 1)
    ResultsDownload(remote).run()
    assert _same(remote, there, "step-000001")


def test_g22_the_weights_are_home_before_what_a_resume_needs_besides(
    remote: RemoteFolder, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results_download, "_AT_ONCE_BYTES", 0)
    commit(there, 1)
    seen: list[list[str]] = []
    here = remote.here / "checkpoints" / "step-000001"
    ResultsDownload(remote, weights_home=lambda: seen.append(sorted(_files(here)))).run()
    assert seen == [
        ["adapter/adapter_config.json", "adapter/adapter_model.safetensors", "manifest.json", "state.json"]
    ]
    assert _same(remote, there, "step-000001")


def test_g22_a_checkpoint_that_is_removed_while_it_is_copied_comes_home_whole(
    remote: RemoteFolder, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results_download, "_AT_ONCE_BYTES", 0)
    folder = commit(there, 1)
    ResultsDownload(remote, weights_home=lambda: shutil.rmtree(folder)).run()
    assert whole_checkpoints.newest_whole(remote.here / "checkpoints") == "step-000001"


def test_g22_what_was_said_and_which_is_best_come_with_each_step_and_logs_now_and_then(
    remote: RemoteFolder, there: Path
) -> None:
    said, offline = there / "logs" / "rollouts", there / "logs" / "wandb" / "offline-run-20261122_100000-slip"
    said.mkdir()
    (offline / "files").mkdir(parents=True)
    (offline / "files" / "config.yaml").write_text("lr: 1\n")
    for step in (1, 2):
        commit(there, step)
        (said / f"step-{step:06d}.jsonl").write_text(f'{{"step": {step}}}\n')
    for other in ("validation-000002-score.jsonl", "empty-000002-01.jsonl"):
        (said / other).write_text("{}\n")
    (said / ".step-000003.77").write_text("half of it")
    pin(there, 1, 2)
    name_best(there, 1, "a")
    ResultsDownload(remote, logs=False).run()
    assert checkpoints.best(remote.here / "checkpoints") == Best("step-000001", "a")
    assert _files(remote.here / "logs") == {f"rollouts/{name}": text for name, text in _whole(said).items()}

    (said / "step-000001.jsonl").unlink()  # the oldest go
    ResultsDownload(remote).run()
    home = _files(remote.here / "logs")
    assert sorted(home) == [
        "rollouts/empty-000002-01.jsonl",
        "rollouts/step-000002.jsonl",
        "rollouts/validation-000002-score.jsonl",
        "trainer.log",
        f"wandb/{offline.name}/files/config.yaml",
    ]


def _whole(folder: Path) -> dict[str, bytes]:
    return {name: text for name, text in _files(folder).items() if not name.startswith(".")}


def test_g22_another_best_is_known_though_it_is_named_in_the_same_second_in_as_many_letters(
    remote: RemoteFolder, there: Path
) -> None:
    for step in (1, 2):
        commit(there, step)
    pin(there, 1, 2)
    for step in (1, 2):
        name_best(there, step, "a")
        os.utime(there / "checkpoints" / "best.json", (1e9, 1e9))
        ResultsDownload(remote).run()
        assert checkpoints.best(remote.here / "checkpoints") == Best(f"step-{step:06d}", "a")


def test_g22_two_that_lay_out_at_once_do_so_one_after_the_other(there: Path) -> None:
    """As when launch was killed while it looked, and its guardian comes for the results."""
    for step in range(1, 21):
        commit(there, step)
    pin(there, *range(1, 20))
    asked = json.dumps({"newest": 1, "journals": {}})
    command = [sys.executable, remote_staging.__file__, asked]
    at_once = [
        subprocess.Popen(command, cwd=there, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(6)
    ]
    said = [process.communicate() for process in at_once]
    assert [process.returncode for process in at_once] == [0] * 6, said
    assert {out for out, _ in said} == {said[0][0]}
    assert len(json.loads(said[0][0])["files"]) == 20 * 5 + 2, "those of each step, the pins, a log"


def test_g24_a_link_on_a_machine_is_none_here(remote: RemoteFolder, there: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    commit(there, 1)
    (there / "checkpoints" / "step-000001" / "away").symlink_to(outside)
    (there / "logs" / "away.log").symlink_to(outside / "log")
    (there / "logs" / "rollouts").symlink_to(outside)
    ResultsDownload(remote).run()
    assert _same(remote, there, "step-000001")
    assert not [path for path in remote.here.rglob("*") if path.is_symlink()]


def test_g22_metrics_are_added_to_what_is_here_and_taken_anew_where_the_machine_began_again(
    remote: RemoteFolder, there: Path
) -> None:
    journal, home = there / "metrics.jsonl", remote.here / "metrics.jsonl"
    ResultsDownload(remote).run()
    file = home.stat().st_ino
    with journal.open("a") as more:
        more.write('{"step": 2}\n{"st')
    ResultsDownload(remote).run()
    assert home.read_text() == '{"step": 1}\n{"step": 2}\n'
    assert home.stat().st_ino == file, "it was rewritten"
    home.write_text('{"step": 1}\n{"step": 2}\n{"half a li')  # killed in mid-addition
    ResultsDownload(remote).run()
    assert home.read_text() == '{"step": 1}\n{"step": 2}\n'
    journal.write_text('{"step": 1}\n{"step": 2, "again": true}\n')
    ResultsDownload(remote).run()
    assert home.read_text() == journal.read_text()


def test_g23_a_copy_beside_rollouts_has_a_connection_of_its_own_and_a_bounded_rate(
    remote: RemoteFolder, there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, starts = shutil.which("rsync"), tmp_path / "starts"
    shim = tmp_path / "bin" / "rsync"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\necho "$@" >> {starts}\nexec {real} "$@"\n')
    shim.chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{shim.parent}{os.pathsep}{os.environ['PATH']}")
    commit(there, 1)
    ResultsDownload(remote, copy_rate=CopyRate(2_048_000.0)).run()
    rates = [line for line in starts.read_text().splitlines() if "--version" not in line]
    assert rates and all(" --bwlimit=2000 " in line and f"-e {SSH_BY_FILE} " in line for line in rates)
    starts.unlink()
    commit(there, 2)
    ResultsDownload(remote).run()
    assert "--bwlimit" not in starts.read_text()
    # Nor would ssh take the way of another connection, whatever the user's own configuration says.
    said = subprocess.run(
        [*SSH_BY_FILE.split(), "-G", remote.host.address],
        cwd=remote.write_ssh_config(),
        capture_output=True,
        text=True,
    )
    assert "controlmaster false" in said.stdout and "\ncontrolpath" not in said.stdout


def test_g24_what_a_machine_says_it_has_writes_nothing_elsewhere(remote: RemoteFolder, there: Path) -> None:
    told = {"files": {"checkpoints/step-000001/manifest.json": 3}, "journals": [["../../outside", 0, 2]]}
    python = there.parent / "bin" / "python3"
    python.parent.mkdir()
    python.write_text(f"#!/bin/sh\ncat > /dev/null\necho '{json.dumps(told)}'\necho x\n")
    python.chmod(stat.S_IRWXU)
    lying = RemoteFolder(remote.host, remote.there, remote.here)
    shell = lying.shell
    lying.shell = lambda command, *rest: shell(f"PATH={python.parent}:$PATH; {command}", *rest)  # type: ignore[method-assign]
    with pytest.raises(JobFailed, match="its files could not be listed"):
        ResultsDownload(lying).run()
    assert not list(there.parent.parent.parent.rglob("outside"))


# ----------------------------------------------------------------- a rented machine's


def _state(folder: Path) -> int:
    return json.loads((folder / "state.json").read_text())["step"]


def test_g22_a_copy_broken_off_behind_the_weights_costs_the_optimizer_and_not_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results_download, "_AT_ONCE_BYTES", 0)
    sshd = OwnSshd(tmp_path / "sshd")
    record = sshd.rented(RecordStore(Home.find({"LAUNCH_HOME": str(tmp_path / "home")})), "dev")
    machine, results = CloudMachine.from_description(record.machine), tmp_path / "results"
    there = sshd.logs(record).parent
    commit(there, 1)
    assert machine.make_durable(results).durable == 1
    commit(there, 2)
    monkeypatch.setattr("launcher.backends.ssh.remote_results._POLL_SECONDS", 0.0)
    with pytest.raises(NotPulled, match="are still on the machine"):
        machine.make_durable(results, lambda: _state(results / "adapter") == 2)
    assert (_state(results / "adapter"), durable.newest_step(results)) == (2, 1)
    said: list[str] = []
    assert machine.pull(results, said.append).step == 2
    assert durable.newest_step(results) == 2
    assert said and said[-1].startswith("0 MB of 0 MB"), said


def test_g29_results_come_home_where_our_package_was_replaced_in_mid_run(
    remote: RemoteFolder, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lays them out on the machine was read when it was imported."""
    monkeypatch.setattr(remote_staging, "__file__", str(there / "nowhere.py"))
    commit(there, 1)
    ResultsDownload(remote).run()
    assert _same(remote, there, "step-000001")


def test_g22_a_rented_runs_results_are_those_of_a_run_here(tmp_path: Path) -> None:
    """Byte for byte what the machine has, with what was said, wandb's runs and the one that is best."""
    sshd = OwnSshd(tmp_path / "sshd")
    record = sshd.rented(RecordStore(Home.find({"LAUNCH_HOME": str(tmp_path / "home")})), "dev")
    machine, results = CloudMachine.from_description(record.machine), tmp_path / "results"
    there = sshd.logs(record).parent
    offline = there / "logs" / "wandb" / "offline-run-20261122_100000-slip"
    offline.mkdir(parents=True)
    (offline / "run-slip.wandb").write_bytes(bytes(range(256)))
    (there / "logs" / "rollouts").mkdir()
    for step in (1, 2, 3):
        commit(there, step)
        (there / "logs" / "rollouts" / f"step-{step:06d}.jsonl").write_text(f'{{"step": {step}}}\n')
    pin(there, 2)
    name_best(there, 2, "a")
    machine.make_durable(results)
    assert [path.name for path in sorted((results / "rollouts").iterdir())] == [
        f"step-{step:06d}.jsonl" for step in (1, 2, 3)
    ]
    report = machine.pull(results)
    assert (report.step, report.skipped) == (3, ())
    for name in ("step-000002", "step-000003"):
        assert _files(results / "durable" / name) == _files(there / "checkpoints" / name)
    assert json.loads((results / "best" / "best.json").read_text()) == {
        "checkpoint": "step-000002",
        "of": "a",
    }
    assert _state(results / "best") == 2 and _state(results / "adapter") == 3
    assert _files(results / "wandb") == _files(offline.parent)


def test_g29_of_a_machine_that_is_gone_what_is_here_comes_and_what_is_lost_is_said(tmp_path: Path) -> None:
    def unreachable() -> RemoteFolder:
        raise LaunchError("machine cannot be reached by ssh", "no route to host", None)

    here, door = tmp_path / "machine", tmp_path / "gateway.sock"
    commit(here, 2)
    results = RemoteResults("slip-0123abcd", here, unreachable, lambda: True, door, lambda: True, None)
    report = results.pull(tmp_path / "results", no_progress, never_stopped)
    assert (report.step, _state(tmp_path / "results" / "adapter")) == (2, 2)
    assert report.lost == "the machine is gone, with everything after step 2"
    assert report.missing == [report.lost]


def test_g29_a_machine_that_goes_over_its_first_step_is_waited_for_no_more(tmp_path: Path) -> None:
    """Half of that step is here: it never comes whole."""

    def unreachable() -> RemoteFolder:
        raise LaunchError("machine cannot be reached by ssh", "no route to host", None)

    here, door = tmp_path / "machine", tmp_path / "gateway.sock"
    commit(here, 1)
    (here / "checkpoints" / "step-000001" / "adapter" / "adapter_config.json").unlink()
    (here / "logs").mkdir()
    (here / "logs" / "gateway.log").write_text("asked\n")
    results = RemoteResults("slip-0123abcd", here, unreachable, lambda: True, door, lambda: True, None)
    report = results.pull(tmp_path / "results", no_progress, never_stopped)
    assert report.step is None and report.lost == "the machine is gone, with all its results"
    assert report.missing == ["step-000001: adapter/adapter_config.json is missing", report.lost]
    assert (tmp_path / "results" / "logs" / "gateway.log").read_text() == "asked\n"
