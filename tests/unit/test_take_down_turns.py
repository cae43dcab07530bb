"""Whoever ends a run does so alone: who comes second waits for its turn, and says for whom; not for ever."""

from __future__ import annotations

import dataclasses
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.backends.local_machine import LocalMachine
from launcher.base.errors import TeardownUnverified
from launcher.base.processes import ProcessId
from launcher.cli import teardown_verbs
from launcher.records import teardown_lock
from launcher.records.records import RecordStore, RunRecord
from launcher.teardown import guardian, take_down
from tests.support import recorded_machine
from tests.support.environment import PROGRAMS
from tests.support.left_alone import environ, left_alone, store, there, typed
from tests.support.typed import Typed
from tests.support.waiting import wait_until

__all__ = ["store", "there", "typed"]

pytestmark = pytest.mark.process


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
        env=environ(),
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

    with teardown_lock.exclusive(folder, "down", note):
        holder = teardown_lock.owner(folder)
        assert holder is not None and (holder.who, holder.process) == ("down", ProcessId.own())
    assert said[0] == f"{folder.name}: gc (pid {first.pid}) is ending it: copying results; waiting"
    assert teardown_lock.owner(folder) is None


@pytest.mark.parametrize("insist", [False, True])
def test_g28_a_holder_that_is_stopped_is_not_waited_for_for_ever(
    store: RecordStore, holding: list[subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch, insist: bool
) -> None:
    assert teardown_lock._PROGRESS_SECONDS < 30 >= teardown_lock.STUCK_SECONDS
    monkeypatch.setattr(teardown_lock, "STUCK_SECONDS", 0.5)
    folder = store.folder(store.create().id)
    first = hold(folder, "gc", holding)
    first.send_signal(signal.SIGSTOP)
    said: list[str] = []
    if insist:
        with teardown_lock.exclusive(folder, "guardian", said.append, insist=True):
            assert "it is stuck; continuing without it" in said[-1]
        return
    with (
        pytest.raises(TeardownUnverified, match="could not verify") as refused,
        teardown_lock.exclusive(folder, "down", said.append),
    ):
        pytest.fail("not reached")
    assert refused.value.hint == f"kill -CONT {first.pid}"


def test_g28_a_full_disk_does_not_keep_anybody_from_waiting(
    store: RecordStore, holding: list[subprocess.Popen[str]]
) -> None:
    """Who holds it is written over what stood there: no byte more than when the run was made."""
    folder = store.folder(store.create().id)
    size = (folder / teardown_lock.FILE).stat().st_size
    hold(folder, "gc", holding)
    assert (folder / teardown_lock.FILE).stat().st_size == size > 0
    shutil.rmtree(folder)
    with teardown_lock.exclusive(folder, "down", lambda line: pytest.fail(line)) as turn:
        turn.report("its folder is gone: nobody could be asked")


@pytest.mark.parametrize("who", ["down", "guardian"])
@pytest.mark.parametrize("resumed", [True, False])
def test_g28_who_stood_still_while_it_copied_ends_no_later_life(
    store: RecordStore, there: Path, monkeypatch: pytest.MonkeyPatch, resumed: bool, who: str
) -> None:
    """Another one did not wait for it, ended the run with proof, and the run was resumed."""
    record = left_alone(store, there)
    real = recorded_machine.RecordedMachine.pull

    def pull(machine: Any, *args: Any) -> Any:
        report = real(machine, *args)
        proof = {"verified": True, "detail": "nothing is left"}
        store.update(record.id, state="verified", ended=record.now(), ended_by="gc", proof=proof)
        if resumed:
            store.reopen(record.id)
        return report

    monkeypatch.setattr(recorded_machine.RecordedMachine, "pull", pull)
    if who == "guardian":
        assert guardian._end(store, record.id, record.launch) == 0
    elif resumed:
        with pytest.raises(TeardownUnverified, match=r"^dev is live again"):
            take_down.take_down(store, record, "down")
    else:
        assert take_down.take_down(store, record, "down").ended_by == "gc"
    assert "down" not in recorded_machine.calls(there)
    assert store.load(record.id).ended_by == (None if resumed else "gc")


def test_g28_a_run_that_was_resumed_while_its_end_waited_for_its_turn_goes_on(
    store: RecordStore, there: Path
) -> None:
    record = left_alone(store, there)
    proof = {"verified": True, "detail": "nothing is left"}
    store.update(record.id, state="verified", ended=record.now(), ended_by="gc", proof=proof)
    store.reopen(record.id)
    with pytest.raises(TeardownUnverified, match=r"^dev is live again"):
        take_down.take_down(store, record, "down")
    assert recorded_machine.calls(there) == [] and store.load(record.id).live


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
    monkeypatch.setattr(teardown_verbs, "_ORDERLY_SECONDS", 0.0)
    asked = take_down.after_guardian

    def begin_late(*words: Any) -> RunRecord:
        # As an older version writes it.
        waiting = "waiting for results that cannot be brought home"
        hold(store.folder(record.id), "launch", holding, waiting)
        return asked(*words)

    monkeypatch.setattr(take_down, "after_guardian", begin_late)
    done = typed("down", "dev")
    assert done.returncode == 8, done.stderr
    assert "dev is kept: its newest results could not be copied" in done.stderr
    assert f"launch (pid {holding[-1].pid}) keeps trying" in done.stderr
    assert "launch down dev --give-up-results" in done.stderr
    assert store.load(record.id).live and recorded_machine.calls(there) == []


@pytest.mark.slow
def test_g28_down_gc_and_the_guardian_at_once_are_one_teardown(store: RecordStore, tmp_path: Path) -> None:
    record = store.create(name="dev")
    machine = LocalMachine(record.id, store.folder(record.id) / "machine", tmp_path / "environments")
    machine.provision()
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
            env=environ(),
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
