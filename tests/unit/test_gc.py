"""`launch gc`: what the ledger forgot is found and ended, and nothing of anyone else's is touched."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launcher.backends import environments, local_machine
from launcher.backends.local_machine import LocalMachine
from launcher.base.home import Home
from launcher.base.processes import ProcessId
from launcher.records.records import RUN_VARIABLE, RecordStore, RunRecord
from launcher.teardown import leftovers
from runtime import bootstrap
from tests.support.typed import Typed

pytestmark = pytest.mark.process

OLD = 3 * 86400.0


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Typed:
    # Sockets of this machine's real runs are none of a test's business.
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "sockets"))
    monkeypatch.setattr(leftovers, "socket_parents", lambda: [tmp_path / "sockets"])
    (tmp_path / "sockets").mkdir()
    return Typed(tmp_path / "project", tmp_path / "home")


@pytest.fixture
def home(typed: Typed) -> Home:
    return Home.find({"LAUNCH_HOME": str(typed.home)})


@pytest.fixture
def store(home: Home) -> RecordStore:
    return RecordStore(home)


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """A process that waits, with these variables in its environment."""
    started: list[subprocess.Popen[bytes]] = []

    def start_one(**variables: str) -> subprocess.Popen[bytes]:
        program = [sys.executable, "-S", "-c", "import time; print(flush=True); time.sleep(600)"]
        process = subprocess.Popen(program, env={**os.environ, **variables}, stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        started.append(process)
        return process

    yield start_one
    for process in started:
        process.kill()
        process.wait()


def of_run(home: Home, run_id: str) -> dict[str, str]:
    """What a process of a run's runtime has in its environment."""
    return {RUN_VARIABLE: run_id, "PYTHONPATH": str(home.run_folder(run_id) / "machine" / "code")}


def found(typed: Typed, *words: str) -> list[dict[str, object]]:
    """What `launch gc` names."""
    return json.loads(typed("gc", "--json", *words).stdout)["found"]


def over(store: RecordStore, name: str, ago: float = 0.0) -> RunRecord:
    record = store.create(name=name)
    return store.update(record.id, state="verified", ended=time.time() - ago)


def test_g08_gc_ends_what_the_ledger_forgot_and_leaves_strangers_alone(
    typed: Typed, home: Home, store: RecordStore, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    record = store.create(name="dev")
    ours = start(**of_run(home, record.id))
    program = start(
        **{RUN_VARIABLE: record.id, "LAUNCH_RUN_DIR": str(home.run_folder(record.id) / "results")}
    )
    stranger = start()
    other_home = start(
        **{RUN_VARIABLE: "slip-01234567", "PYTHONPATH": "/elsewhere/runs/slip-01234567/machine/code"}
    )
    other_id = start(**{**of_run(home, record.id), RUN_VARIABLE: "mine"})
    assert found(typed) == [], "a live run that is looked after is nobody's left-over"

    shutil.rmtree(home.run_folder(record.id))
    (find,) = found(typed)
    assert find["kind"] == "processes"
    assert find["pids"] == sorted([ours.pid, program.pid])
    assert "there is no record of it" in str(find["why"])
    assert ours.poll() is None, "nobody agreed yet"

    done = typed("gc", "--yes")
    assert done.returncode == 0, done.stderr
    assert "ended" in done.stdout
    ours.wait(10)
    program.wait(10)
    assert [process.poll() for process in (stranger, other_home, other_id)] == [None] * 3
    assert found(typed) == []


def test_processes_of_a_run_that_is_over_are_ended(
    typed: Typed, home: Home, store: RecordStore, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    left = start(**of_run(home, over(store, "dev").id))
    assert [find["pids"] for find in found(typed)] == [[left.pid]]
    assert typed("gc", "--yes").returncode == 0
    left.wait(10)


def test_a_run_that_starts_while_we_look_is_not_touched(
    home: Home, store: RecordStore, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    record = over(store, "dev")
    process = start(**of_run(home, record.id))
    (find,) = [find for find in leftovers.find_leftovers(home, None, False, OLD) if find.kind == "processes"]
    store.update(record.id, state="work")
    assert find.remove() == "it is still alive"
    assert process.poll() is None


def test_a_run_that_nobody_looks_after_is_taken_down_with_proof(
    typed: Typed, home: Home, store: RecordStore, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    record = store.create(name="dev")
    machine = LocalMachine(record.id, store.folder(record.id) / "machine", home.environments)
    machine.provision()
    keeper = start(**of_run(home, record.id))
    gone = ProcessId(2**22, "long ago")
    store.update(record.id, state="work", launch=gone, guardian=gone, machine=machine.describe())
    (find,) = found(typed)
    assert (find["kind"], find["run_id"]) == ("run", record.id)
    assert "neither its launch nor its guardian is alive" in str(find["why"])
    done = typed("gc", "--yes", "--json")
    assert [find["done"] for find in json.loads(done.stdout)["found"]] == ["down: verified"]
    keeper.wait(10)
    ended = store.load(record.id)
    assert (ended.state, ended.ended_by) == ("verified", "gc")
    assert not Path(machine.socket_dir).exists()


def test_without_a_terminal_nobody_is_asked_and_nothing_goes(
    typed: Typed, home: Home, store: RecordStore, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    left = start(**of_run(home, over(store, "dev").id))
    done = typed("gc")
    assert done.returncode == 0
    assert str(left.pid) in done.stdout
    assert "nothing was removed: launch gc --yes" in done.stderr
    done = typed("gc", "--older-than", "7 d", "--unpulled", "--give-up-results", "dev")
    same = "launch gc --older-than '7 d' --unpulled --give-up-results dev --yes"
    assert f"nothing was removed: {same}" in done.stderr, "what is pasted removes what was shown"
    assert left.poll() is None


@pytest.mark.parametrize(("answer", "goes"), [("y\n", True), ("\n", False), ("n\n", False), ("", False)])
def test_on_a_terminal_the_answer_decides(
    typed: Typed, store: RecordStore, monkeypatch: pytest.MonkeyPatch, answer: str, goes: bool
) -> None:
    import io

    debris = store.folder(over(store, "dev").id) / "results" / ".incoming-x"
    debris.mkdir(parents=True)
    stdin = io.StringIO(answer)
    monkeypatch.setattr(sys, "stdin", stdin)
    monkeypatch.setattr("launcher.console.consent.can_prompt", lambda output: True)
    done = typed("gc")
    assert done.returncode == 0
    assert "[y/N]" in done.stderr
    assert debris.exists() != goes


def test_sockets_go_when_their_run_is_over_and_those_of_other_homes_stay(
    typed: Typed,
    home: Home,
    store: RecordStore,
    tmp_path: Path,
    start: Callable[..., subprocess.Popen[bytes]],
) -> None:
    ended, live = over(store, "dev").id, store.create(name="live").id
    names = {
        "over": ended,
        "live": live,
        "old": "slip-00000001",
        "new": "slip-00000002",
        "run": "slip-00000003",
        "other": "slip-00000004",
        "unknown": "slip-00000005",
    }
    folders = {key: tmp_path / "sockets" / name for key, name in names.items()}
    for key, folder in folders.items():
        owner = home if key != "other" else Home.find({"LAUNCH_HOME": str(tmp_path / "other")})
        local_machine.make_own_folder(folder, owner.run_folder(folder.name))
        (folder / "gateway.sock").touch()
    (folders["unknown"] / "run").unlink()
    long_ago = time.time() - 3600
    for key in names.keys() - {"over", "new"}:
        os.utime(folders[key], (long_ago, long_ago))
    start(**{RUN_VARIABLE: names["run"]})
    (tmp_path / "sockets" / "slip-is-no-id").mkdir()
    assert {find["path"] for find in found(typed)} == {str(folders["over"]), str(folders["old"])}
    done = typed("gc", "--yes")
    assert done.returncode == 0 and "left alone: 2 socket folders of runs that this home" in done.stderr
    assert {key for key, folder in folders.items() if not folder.exists()} == {"over", "old"}


def test_half_built_environments_go_and_those_being_built_stay(typed: Typed, home: Home) -> None:
    import fcntl

    root = home.environments
    for name in ("dead", "busy"):
        (root / f".cpu-py3.11-{name}.building-x" / "bin").mkdir(parents=True)
        (root / f".cpu-py3.11-{name}.lock").touch()
    with (root / ".cpu-py3.11-busy.lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert [find["path"] for find in found(typed)] == [str(root / ".cpu-py3.11-dead.building-x")]
        assert typed("gc", "--yes").returncode == 0
    assert sorted(path.name for path in root.glob(".*.building-*")) == [".cpu-py3.11-busy.building-x"]


def test_environments_of_no_version_go_when_nobody_asked_for_them_for_long(typed: Typed, home: Home) -> None:
    python = ".".join(map(str, sys.version_info[:2]))
    current = bootstrap.Environment(home.environments, "cpu")
    names = {"now": current.name, "old": f"cpu-py{python}-0123456789ab", "other": "cpu-py3.1-0123456789ab"}
    for name in names.values():
        marker = home.environments / name / bootstrap.MARKER
        marker.parent.mkdir(parents=True)
        marker.write_text("{}")
    assert found(typed) == [], "just used"
    long_ago = time.time() - 8 * 86400
    for name in names.values():
        os.utime(home.environments / name / bootstrap.MARKER, (long_ago, long_ago))
    assert [find["path"] for find in found(typed)] == [str(home.environments / names["old"])]
    assert typed("gc", "--yes").returncode == 0
    assert {path.name for path in home.environments.iterdir()} == {names["now"], names["other"]}


def test_an_environment_in_use_stays(typed: Typed, home: Home) -> None:
    python = ".".join(map(str, sys.version_info[:2]))
    folder = home.environments / f"cpu-py{python}-0123456789ab"
    (folder / "bin").mkdir(parents=True)
    (folder / bootstrap.MARKER).write_text("{}")
    os.utime(folder / bootstrap.MARKER, (0, 0))
    shutil.copy("/bin/sleep", folder / "bin" / "python")
    process = subprocess.Popen([folder / "bin" / "python", "600"])
    try:
        assert found(typed) == []
    finally:
        process.kill()
        process.wait()
    assert environments.last_used(folder) == 0
    assert len(found(typed)) == 1


def committed(store: RecordStore, record: RunRecord, step: int, home_step: int | None) -> Path:
    """The folders of a run that committed `step` and brought `home_step` home."""
    folder = store.folder(record.id)
    (folder / "machine" / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
    if home_step is not None:
        (folder / "results" / "adapter").mkdir(parents=True)
        (folder / "results" / "adapter" / "state.json").write_text(json.dumps({"step": home_step}))
    return folder


def test_old_runs_go_only_when_told_and_their_results_stay(typed: Typed, store: RecordStore) -> None:
    old = committed(store, over(store, "old", ago=8 * 86400), 7, 7)
    committed(store, over(store, "new", ago=86400), 7, 7)
    unpulled = committed(store, over(store, "unpulled", ago=8 * 86400), 7, 6)
    committed(store, store.create(name="live"), 7, 7)
    assert found(typed) == []
    assert typed("gc", "--yes").returncode == 0
    assert [find["path"] for find in found(typed, "--older-than", "7d")] == [str(old / "machine")]
    both = {str(old / "machine"), str(unpulled / "machine")}
    assert {find["path"] for find in found(typed, "--older-than", "7d", "--unpulled")} == both
    assert typed("gc", "--older-than", "7d", "--yes").returncode == 0
    assert not (old / "machine").exists() and (old / "results" / "adapter" / "state.json").exists()
    assert (unpulled / "machine").exists()
    assert store.load("old").state == "verified"


def benched(home: Home, name: str) -> tuple[Path, RecordStore]:
    """A bench's folder, and the runs of its only run's own home."""
    folder = home.benches / name
    own = folder / "ours-0" / "home"
    own.mkdir(parents=True)
    (own / "cache").symlink_to(home.cache, target_is_directory=True)
    for figures in (folder / "bench.json", folder / "ours-0" / "run.json"):
        figures.write_text("{}")
    return folder, RecordStore(Home(own, own, own / "cache"))


def test_what_old_benches_ran_goes_only_when_told_and_their_figures_stay(
    typed: Typed, home: Home, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    home.cache.mkdir(parents=True)
    (home.cache / "kept").touch()
    (old, runs), (new, newer), (busy, _) = (benched(home, name) for name in ("old", "new", "busy"))
    over(runs, "old", ago=8 * 86400)
    over(newer, "new", ago=86400)
    start(LAUNCH_HOME=str(busy / "ours-0" / "home"))
    for folder in (old, busy):
        os.utime(folder / "ours-0" / "home", (0, 0))
    assert found(typed) == []
    (find,) = found(typed, "--older-than", "7d")
    assert (find["kind"], find["path"]) == ("old bench", str(old / "ours-0" / "home"))
    assert "its figures and logs stay" in str(find["why"])
    assert typed("gc", "--older-than", "7d", "--yes").returncode == 0
    assert sorted(str(it.relative_to(old)) for it in old.rglob("*")) == [
        "bench.json",
        "ours-0",
        "ours-0/run.json",
    ]
    assert (home.cache / "kept").exists(), "what is linked to is not the bench's"
    assert (new / "ours-0" / "home").exists() and (busy / "ours-0" / "home").exists()


def test_a_benchs_run_that_nobody_looks_after_is_taken_down_before_it_goes(typed: Typed, home: Home) -> None:
    folder, runs = benched(home, "killed")
    gone = ProcessId(2**22, "long ago")
    record = runs.create()
    runs.update(record.id, state="work", created=0.0, launch=gone, guardian=gone)
    os.utime(folder / "ours-0" / "home", (0, 0))
    (find,) = found(typed, "--older-than", "7d")
    assert (find["kind"], find["run_id"]) == ("run", record.id)
    assert typed("gc", "--yes").returncode == 0
    assert (runs.load(record.id).state, runs.load(record.id).ended_by) == ("verified", "gc")


def test_what_cannot_be_removed_is_said_and_decides_the_exit_code(
    typed: Typed, home: Home, store: RecordStore, monkeypatch: pytest.MonkeyPatch,
    start: Callable[..., subprocess.Popen[bytes]],
) -> None:  # fmt: skip
    record = over(store, "dev")
    left = start(**of_run(home, record.id))
    monkeypatch.setattr(leftovers.processes, "end", lambda find, grace: find())
    done = typed("gc", "--yes")
    assert done.returncode == 5
    assert "NOT removed" in done.stdout
    assert f"kill -9 {left.pid}" in done.stderr


def test_p08_a_cloud_that_could_not_be_asked_is_exit_5_whatever_else_went_well(
    typed: Typed, home: Home, store: RecordStore, tmp_path: Path,
    start: Callable[..., subprocess.Popen[bytes]],
) -> None:  # fmt: skip
    """Runs of this home were on two clouds once, and there is an account with neither any more."""
    home.data.mkdir(parents=True, exist_ok=True)
    (home.data / "clouds.json").write_text(json.dumps(["lambda", "runpod"]))
    environ = {"HOME": str(tmp_path / "nobody")}
    nothing = typed("gc", **environ)
    assert nothing.returncode == 5, nothing
    assert "earlier runs left nothing behind; lambda, runpod could not be asked" in nothing.stdout
    assert (
        "Error: lambda, runpod could not be asked" in nothing.stderr and "Hint: sky check" in nothing.stderr
    )

    record = over(store, "dev")
    left = start(**of_run(home, record.id))
    shown = typed("gc", **environ)
    assert shown.returncode == 5 and left.poll() is None
    removed = typed("gc", "--yes", "--json", **environ)
    said = json.loads(removed.stdout)
    assert removed.returncode == 5 and said["removed"] and said["unasked"] == ["lambda", "runpod"]
    assert left.wait(60) != 0
