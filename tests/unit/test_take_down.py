"""Ending a run that its launch does not end: `launch down`, `launch gc`, the guardian, and all at once."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.base import processes
from launcher.base.errors import NotPulled, TeardownUnverified
from launcher.base.home import Home
from launcher.base.processes import ProcessId
from launcher.cli import ending_verbs
from launcher.ledger import teardown_lock
from launcher.ledger.records import RUN_VARIABLE, RecordStore, RunRecord
from launcher.machines import machine_of_record
from launcher.machines.local import LocalMachine
from launcher.results import background_copy
from launcher.run import taking_up
from launcher.safety import giving_up, guardian, leftovers, take_down
from tests.support import recorded_machine
from tests.support.environment import PROGRAMS, REPOSITORY
from tests.support.typed import Typed
from tests.support.waiting import wait_until

pytestmark = pytest.mark.process

PRICE = 12.0
# Before the tests make it short.
AS_IT_IS = take_down.TRIES_SECONDS


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Typed:
    monkeypatch.setattr(leftovers, "socket_parents", lambda: [])
    monkeypatch.setitem(
        machine_of_record._KINDS, recorded_machine.KIND, ("tests.support.recorded_machine", "RecordedMachine")
    )
    monkeypatch.setattr(take_down, "TRIES_SECONDS", 0.5)
    monkeypatch.setattr(background_copy, "_AGAIN_SECONDS", 0.05)
    return Typed(tmp_path / "project", tmp_path / "home")


@pytest.fixture
def store(typed: Typed) -> RecordStore:
    return RecordStore(Home.find({"LAUNCH_HOME": str(typed.home)}))


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """The machine's own folder."""
    return tmp_path / "there"


def left_alone(store: RecordStore, there: Path, ago: float = 0.0, **plan: float) -> RunRecord:
    """A rented run named dev, at work, whose launch and guardian are gone; it began so long ago."""
    record = store.create(name="dev", details={"plan": plan})
    gone = ProcessId(2**22, "long ago")
    machine = recorded_machine.describe(there, PRICE)
    changes = {"state": "work", "launch": gone, "guardian": gone, "url": "http://127.0.0.1:1"}
    return store.update(record.id, machine=machine, begun=time.time() - ago, **changes)


# ----------------------------------------------------------------- results are kept until they are given up


@pytest.mark.parametrize("words", [["down", "dev"], ["gc", "--yes"]], ids=" ".join)
def test_g29_a_machine_whose_results_do_not_come_home_is_kept_with_8(
    typed: Typed, store: RecordStore, there: Path, words: list[str]
) -> None:
    record = left_alone(store, there)
    (there / "pull-fails").touch()
    done = typed(*words)
    assert done.returncode == 8, done.stderr
    assert "dev is kept: its newest results could not be copied" in done.stdout + done.stderr
    assert "$12.00/h" in done.stdout + done.stderr
    assert "launch down dev --give-up-results" in done.stderr
    assert store.load(record.id).live
    assert "down" not in recorded_machine.calls(there)
    assert len(recorded_machine.calls(there)) >= 2, "it was tried again"


@pytest.mark.parametrize(
    "words", [["down", "dev", "--give-up-results"], ["gc", "--yes", "--give-up-results", "dev"]], ids=" ".join
)
def test_g29_results_given_up_by_name_go_with_their_machine_and_that_is_said(
    typed: Typed, store: RecordStore, there: Path, words: list[str]
) -> None:
    record = left_alone(store, there)
    (there / "pull-fails").touch()
    done = typed(*words)
    assert done.returncode == 0, done.stderr
    assert "its newest results are lost with it: they were given up" in done.stderr
    ended = store.load(record.id)
    assert ended.state == "verified" and "rsync ended with code 13" in str(ended.unpulled)
    assert recorded_machine.calls(there)[-1] == "down"
    assert "NOT copied" in typed("status", "dev").stdout


@pytest.mark.parametrize("said", ["with it", "from another terminal"])
def test_g29_a_copy_that_goes_on_and_on_is_broken_off_once_its_results_are_given_up(
    typed: Typed, store: RecordStore, there: Path, said: str
) -> None:
    record = left_alone(store, there)
    (there / "pull-hangs").touch()
    if said == "with it":
        done = typed("down", "dev", "--give-up-results")
    else:
        store.update(record.id, given_up=True)
        done = typed("gc", "--yes")
    assert done.returncode == 0, done.stderr
    ended = store.load(record.id)
    assert ended.state == "verified" and "it was broken off" in str(ended.unpulled)
    assert recorded_machine.calls(there) == ["pull", "down"]


def test_g29_results_that_do_not_come_are_tried_for_a_minute_and_a_copy_has_one(
    store: RecordStore, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = left_alone(store, there)
    (there / "pull-fails").touch()
    tried: list[float] = []
    monkeypatch.setattr(take_down, "TRIES_SECONDS", AS_IT_IS)
    monkeypatch.setattr(take_down, "pull_patiently", lambda machine, into, seconds, *_: tried.append(seconds))
    monkeypatch.setattr(giving_up, "after", lambda seconds, given_up: tried.append(seconds) or given_up)
    with pytest.raises(NotPulled):
        take_down.take_down(store, record, "down")
    assert tried == [60.0, 60.0]
    assert ending_verbs._KEEPING_SECONDS == 60.0, "and whoever typed it waits with a launch for as long"


def test_g29_results_that_are_given_up_while_they_are_tried_for_go_with_their_machine(
    typed: Typed, store: RecordStore, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = left_alone(store, there)
    (there / "pull-fails").touch()
    tries = background_copy.pull_patiently

    def given_up_meanwhile(*words: Any) -> None:
        store.update(record.id, given_up=True)
        assert tries(*words) is None

    monkeypatch.setattr(take_down, "TRIES_SECONDS", 3600.0)
    monkeypatch.setattr(take_down, "pull_patiently", given_up_meanwhile)
    done = typed("gc", "--yes")
    assert done.returncode == 0, done.stderr
    assert "its newest results are lost with it: they were given up" in done.stderr
    assert store.load(record.id).state == "verified"


@pytest.mark.parametrize(("verb", "code"), [("down", 8), ("gc", 0)])
def test_g29_results_that_went_with_a_machine_that_is_gone_are_said_to_be_lost(
    typed: Typed, store: RecordStore, there: Path, verb: str, code: int
) -> None:
    """Its own timer ended it: nobody can keep it any more, and nobody may think that all is at home."""
    record = left_alone(store, there)
    (there / "gone").touch()
    done = typed("down", "dev") if verb == "down" else typed("gc", "--yes")
    assert done.returncode == code, done.stderr
    lost = "the machine is gone, with what it had after step 3"
    assert lost in done.stdout + done.stderr
    ended = store.load(record.id)
    assert (ended.state, ended.unpulled) == ("verified", lost)
    assert "NOT copied" in typed("status", "dev").stdout


def test_g29_of_a_run_that_was_never_ready_nothing_is_lost(
    typed: Typed, store: RecordStore, there: Path
) -> None:
    record = left_alone(store, there)
    store.update(record.id, url=None, state="setup")
    (there / "gone").touch()
    assert typed("down", "dev").returncode == 0
    assert store.load(record.id).unpulled is None


def test_g29_gc_gives_up_only_what_is_named(typed: Typed, store: RecordStore, there: Path) -> None:
    record = left_alone(store, there)
    (there / "pull-fails").touch()
    store.create(name="other")
    assert typed("gc", "--yes", "--give-up-results", "other").returncode == 8
    assert store.load(record.id).live
    assert typed("gc", "--yes", "--give-up-results", "nobody").returncode == 2


@pytest.mark.parametrize("limit", [{"deadline_seconds": 60.0}, {"budget": 2.0}], ids=str)
def test_g29_a_machine_is_not_kept_past_deadline_or_budget(
    typed: Typed, store: RecordStore, there: Path, limit: dict[str, float]
) -> None:
    record = left_alone(store, there, ago=3600.0, **limit)
    (there / "pull-fails").touch()
    done = typed("down", "dev")
    assert done.returncode == 8, done.stderr
    assert "its newest results were not copied" in done.stderr
    assert not store.load(record.id).live
    assert recorded_machine.calls(there) == ["pull", "down"]


def test_g29_results_that_come_are_home_and_the_machine_is_down(
    typed: Typed, store: RecordStore, there: Path
) -> None:
    record = left_alone(store, there)
    done = typed("down", "dev")
    assert done.returncode == 0, done.stderr
    assert (store.folder(record.id) / "results" / "came-home").exists()
    assert recorded_machine.calls(there) == ["pull", "down"]
    assert typed("down", "dev").returncode == 0, "twice is the same"


def test_g29_a_run_whose_results_are_still_out_there_is_not_taken_up(
    typed: Typed, store: RecordStore, there: Path
) -> None:
    left_alone(store, there)
    (there / "pull-fails").touch()
    with pytest.raises(NotPulled, match="dev is kept"):
        taking_up.take_up(
            store, store.load("dev"), lambda record: pytest.fail("not asked"), lambda line: None
        )


@pytest.mark.slow
@pytest.mark.parametrize("trouble", [None, "pull-fails", "pull-hangs"])
def test_g29_the_guardian_tries_to_bring_them_home_and_then_ends_it(
    typed: Typed, store: RecordStore, there: Path, trouble: str | None
) -> None:
    record = left_alone(store, there)
    if trouble is not None:
        (there / trouble).touch()
    begun = time.monotonic()
    done = _guarded(store, record)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - begun < guardian.PULL_SECONDS + 60
    ended = store.load(record.id)
    assert (ended.state, ended.ended_by) == ("verified", "guardian")
    assert bool(ended.unpulled) == (trouble is not None)
    assert recorded_machine.calls(there) == ["pull", "down"]


def test_g29_what_was_given_up_is_not_said_to_be_at_home(store: RecordStore, there: Path) -> None:
    """`launch down --give-up-results`, whose launch then dies: its guardian does not ask for them again."""
    record = left_alone(store, there)
    store.update(record.id, given_up=True)
    done = _guarded(store, record)
    assert done.returncode == 0, done.stderr
    assert store.load(record.id).unpulled == "they were given up"
    assert recorded_machine.calls(there) == ["down"]


def _guarded(store: RecordStore, record: RunRecord) -> subprocess.CompletedProcess[str]:
    """A guardian whose launcher is gone, to its end."""
    return subprocess.run(
        [sys.executable, PROGRAMS / "unit" / "end_run.py", store.runs.parent, record.id, "guardian"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=_environ(),
    )


@pytest.mark.parametrize("trouble", [None, "pull-fails"])
def test_g27_results_are_given_up_on_a_full_disk_too(
    typed: Typed, store: RecordStore, there: Path, trouble: str | None
) -> None:
    """What is to become the record is the device on which there is never any room."""
    record = left_alone(store, there)
    if trouble is not None:
        (there / trouble).touch()
    (store.folder(record.id) / ".record.json.tmp").symlink_to("/dev/full")
    done = typed("down", "dev", "--give-up-results")
    assert recorded_machine.calls(there) == ["pull", "down"], done.stderr
    assert done.returncode == 3, done.stderr
    assert "dev is down, but its record cannot be written" in done.stderr


def test_g27_what_this_computer_refuses_a_verb_is_3_and_no_bug(
    typed: Typed, store: RecordStore, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_alone(store, there)

    def refuse(*words: object, **more: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "somewhere")

    monkeypatch.setattr(take_down, "take_down", refuse)
    done = typed("down", "dev")
    assert done.returncode == 3, done.stderr
    assert "No space left on device: somewhere" in done.stderr and "bug" not in done.stderr


def test_g27_what_one_find_raises_keeps_gc_from_no_other(
    typed: Typed, store: RecordStore, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.update(store.create(name="first").id, state="work", launch=ProcessId(2**22, "long ago"))
    left_alone(store, there)
    real = take_down.take_down

    def refuse_the_first(store: RecordStore, record: RunRecord, *words: Any, **more: Any) -> RunRecord:
        if record.name == "first":
            raise RuntimeError("a library's own")
        return real(store, record, *words, **more)

    monkeypatch.setattr(take_down, "take_down", refuse_the_first)
    done = typed("gc", "--yes")
    assert done.returncode == 1 and "a library's own" in done.stdout + done.stderr
    assert recorded_machine.calls(there) == ["pull", "down"]


# ----------------------------------------------------------------- one teardown at a time


@pytest.mark.slow
def test_g28_a_guardian_leaves_a_run_alone_that_another_launch_has_taken_up(
    store: RecordStore, there: Path
) -> None:
    """Its launch stood still, `launch down` went on without it, and the run was resumed."""
    record = left_alone(store, there)
    watch = subprocess.Popen(
        [sys.executable, PROGRAMS / "unit" / "end_run.py", store.runs.parent, record.id, "guardian"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=_environ(),
    )
    assert watch.stdout is not None and watch.stdout.readline() == "ready\n"
    named = ProcessId.of(watch.pid)
    assert named is not None
    wait_until(lambda: _idle(named), what="it waits for the end of its pipe")
    store.update(record.id, state="verified", ended=time.time(), ended_by="down", proof={"verified": True})
    store.reopen(record.id)
    again = {"state": "work", "machine": recorded_machine.describe(there, PRICE), "url": "http://127.0.0.1:2"}
    store.update(record.id, **again)
    _, said = watch.communicate(timeout=180)
    assert watch.returncode == 0, said
    assert recorded_machine.calls(there) == [], said
    assert store.load(record.id).state == "work"


@pytest.fixture
def holding() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that hold the right to end a run."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


def hold(
    folder: Path, who: str, started: list[subprocess.Popen[str]], doing: str = "copying results"
) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, PROGRAMS / "unit" / "hold_teardown.py", folder, who, doing],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=_environ(),
    )
    started.append(process)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_g28_whoever_comes_second_waits_and_says_for_whom(
    store: RecordStore, holding: list[subprocess.Popen[str]]
) -> None:
    folder = store.folder(store.create().id)
    first = hold(folder, "gc", holding)
    said: list[str] = []

    def note(line: str) -> None:
        said.append(line)
        first.kill()  # the system frees what it held

    with teardown_lock.alone(folder, "down", note):
        holder = teardown_lock.holder(folder)
        assert holder is not None and (holder.who, holder.process) == ("down", ProcessId.own())
    assert said[0] == f"{folder.name}: gc (pid {first.pid}) is ending it: copying results; waiting"
    assert teardown_lock.holder(folder) is None


@pytest.mark.parametrize("insist", [False, True])
def test_g28_a_holder_that_is_stopped_is_not_waited_for_for_ever(
    store: RecordStore, holding: list[subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch, insist: bool
) -> None:
    assert teardown_lock._SAY_EVERY_SECONDS < 30 >= teardown_lock.STILL_SECONDS
    monkeypatch.setattr(teardown_lock, "STILL_SECONDS", 0.5)
    folder = store.folder(store.create().id)
    first = hold(folder, "gc", holding)
    first.send_signal(signal.SIGSTOP)
    said: list[str] = []
    if insist:
        with teardown_lock.alone(folder, "guardian", said.append, insist=True):
            assert "it is stuck; continuing without it" in said[-1]
        return
    with (
        pytest.raises(TeardownUnverified, match="could not verify") as refused,
        teardown_lock.alone(folder, "down", said.append),
    ):
        pytest.fail("not reached")
    assert refused.value.hint == f"kill -CONT {first.pid}"


def test_g29_down_says_8_also_to_a_launch_that_began_its_end_late_and_keeps_the_machine(
    typed: Typed,
    store: RecordStore,
    there: Path,
    holding: list[subprocess.Popen[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`down` had waited for that for long enough, and waits for its own turn: not for the whole lease."""
    record = left_alone(store, there)
    deaf = subprocess.Popen(
        ["sh", "-c", "trap '' TERM; echo deaf; exec sleep 600"], stdout=subprocess.PIPE, text=True
    )
    holding.append(deaf)
    assert deaf.stdout is not None and deaf.stdout.readline() == "deaf\n"
    store.update(record.id, launch=ProcessId.of(deaf.pid))
    monkeypatch.setattr(ending_verbs, "_ORDERLY_SECONDS", 0.0)
    asked = take_down.after_guardian

    def begin_late(*words: Any) -> RunRecord:
        hold(store.folder(record.id), "launch", holding, teardown_lock.KEEPING)
        return asked(*words)

    monkeypatch.setattr(take_down, "after_guardian", begin_late)
    done = typed("down", "dev")
    assert done.returncode == 8, done.stderr
    assert "dev is kept: its newest results could not be copied" in done.stderr
    assert f"launch (pid {holding[-1].pid}) keeps trying" in done.stderr
    assert "launch down dev --give-up-results" in done.stderr
    assert store.load(record.id).live and recorded_machine.calls(there) == []


def test_g28_a_full_disk_does_not_keep_anybody_from_waiting(
    store: RecordStore, holding: list[subprocess.Popen[str]]
) -> None:
    """Who holds it is written over what stood there: no byte more than when the run was made."""
    folder = store.folder(store.create().id)
    size = (folder / teardown_lock.FILE).stat().st_size
    hold(folder, "gc", holding)
    assert (folder / teardown_lock.FILE).stat().st_size == size > 0
    shutil.rmtree(folder)
    with teardown_lock.alone(folder, "down", lambda line: pytest.fail(line)) as turn:
        turn.doing("its folder is gone: nobody could be asked")


@pytest.mark.slow
def test_g28_down_gc_and_the_guardian_at_once_are_one_teardown(store: RecordStore, tmp_path: Path) -> None:
    record = store.create(name="dev")
    machine = LocalMachine(record.id, store.folder(record.id) / "machine", tmp_path / "environments")
    machine.arm()
    terms = tmp_path / "terms"
    keeper = subprocess.Popen([sys.executable, PROGRAMS / "unit" / "count_terms.py", terms, "6"])
    wait_until(terms.exists, what="the keeper counts")
    named = ProcessId.of(keeper.pid)
    assert named is not None
    described = machine.describe() | {"keeper": dataclasses.asdict(named)}
    gone = ProcessId(2**22, "long ago")
    store.update(record.id, state="work", launch=gone, machine=described)
    program = PROGRAMS / "unit" / "end_run.py"
    ending = {
        who: subprocess.Popen(
            [sys.executable, program, store.runs.parent, record.id, who],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=_environ(),
        )
        for who in ("down", "gc", "resume", "guardian")
    }
    keeper.wait(timeout=180)
    said = {who: "".join(process.communicate(timeout=180)) for who, process in ending.items()}
    assert {who: process.returncode for who, process in ending.items()} == dict.fromkeys(ending, 0), said
    assert terms.read_text().splitlines() == ["TERM"], said
    by = store.load(record.id).ended_by
    assert by in ending
    assert sum("is ending it" in text for who, text in said.items() if who != by) >= 1, said
    assert all(f"ended by {by}" in said[who] for who in ("down", "gc", "resume")), said


def _environ() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY)}


# ----------------------------------------------------------------- an upgrade in mid-run


@pytest.mark.slow
def test_g01_a_guardian_whose_package_was_replaced_in_mid_run_still_ends_everything(tmp_path: Path) -> None:
    """What it needs at the moment of death it has imported before."""
    package = tmp_path / "package"
    for half in ("launcher", "runtime"):
        shutil.copytree(
            REPOSITORY / half, package / half, ignore=shutil.ignore_patterns("__pycache__", "*.safetensors")
        )
    home = tmp_path / "home"
    home.mkdir()
    launcher = subprocess.Popen(
        [sys.executable, PROGRAMS / "unit" / "watched_launcher.py", home, "KILL"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(package)},
    )
    assert launcher.stdout is not None and launcher.stdin is not None
    said = json.loads(launcher.stdout.readline())
    store = RecordStore(Home(home, home, home))
    wait_until((home / "child").exists, what="the keeper's child runs")
    watch = ProcessId.of(said["guardian"])
    assert watch is not None
    wait_until(lambda: _idle(watch), what="the guardian waits for the end of its pipe")
    shutil.rmtree(package)
    launcher.stdin.write(b"\n")
    launcher.stdin.close()
    launcher.wait(timeout=120)
    log = store.folder(said["run_id"]) / guardian.LOG
    try:
        wait_until(lambda: not store.load(said["run_id"]).live, what=log.read_text)
        assert store.load(said["run_id"]).ended_by == "guardian"
    finally:
        processes.end(lambda: processes.carrying(RUN_VARIABLE, said["run_id"]), 0)


def _idle(process: ProcessId) -> bool:
    """Whether it has slept for a while, in a read of its pipe: what it had to import is imported."""
    ticks = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    time.sleep(0.5)
    return ticks == Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]


# ----------------------------------------------------------------- the lives of a run


def test_g06_a_run_that_is_taken_up_costs_what_its_lives_cost(
    typed: Typed, store: RecordStore, there: Path
) -> None:
    record = left_alone(store, there, ago=96 * 3600.0)
    an_hour_later = store.load(record.id).life.begun + 3600.0
    store.update(record.id, state="verified", ended=an_hour_later, ended_by="launch")
    store.reopen(record.id)
    store.update(record.id, state="work", machine=recorded_machine.describe(there, PRICE))
    (described,) = json.loads(typed("status", "--json").stdout)["runs"]
    assert 12.0 <= described["cost"] < 13.0, "one hour of the first life, and a moment of this one"
    first, second = described["lives"]
    assert first["price_per_hour"] == second["price_per_hour"] == PRICE
    assert first["ended"] - first["begun"] == pytest.approx(3600.0)
    assert second["ended"] is None and time.time() - second["begun"] < 1000
    shown = typed("status", "dev").stdout
    assert "$0.0" in shown and "so far, $12.0" in shown and "since its first start" in shown
    assert "since start number 2, 1h" in shown
    assert "4d" not in typed("status").stdout


def test_g06_what_is_not_proven_to_be_down_goes_on_costing(
    typed: Typed, store: RecordStore, there: Path
) -> None:
    record = left_alone(store, there, ago=7200.0)
    store.update(record.id, state="unverified", ended=time.time() - 3600.0)
    (described,) = json.loads(typed("status", "--json").stdout)["runs"]
    assert described["cost"] == pytest.approx(2 * PRICE, abs=0.5)
