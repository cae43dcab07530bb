"""launcher/records/records.py: written before anything starts, whole whatever is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from launcher.base.errors import LaunchError, UsageError
from launcher.base.home import Home
from launcher.base.processes import ProcessId
from launcher.records.records import ID_PATTERN, LiveNameError, LiveRunError, RecordStore
from tests.support.environment import PROGRAMS

pytestmark = pytest.mark.process


@pytest.fixture
def store(tmp_path: Path) -> RecordStore:
    return RecordStore(Home(tmp_path, tmp_path, tmp_path))


def _command(home: Path, *words: str) -> list[str | Path]:
    """A process of its own at the records."""
    return [sys.executable, PROGRAMS / "unit" / "use_records.py", home, *words]


def _run(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(_command(home, *words), capture_output=True, text=True)


def test_a_record_is_on_disk_when_create_returns(tmp_path: Path, store: RecordStore) -> None:
    done = _run(tmp_path, "create-and-die", "x", "a", "b")

    assert done.returncode == -signal.SIGKILL
    record = store.load("x")
    assert record.command == ("a", "b") and record.live and not record.is_attended


def test_a_record_comes_back_as_it_was_written(store: RecordStore) -> None:
    created = store.create(name="x", command=("python", "a b.py"), details={"plan": {"gpus": 0}})
    updated = store.update(created.id, state="work", machine={"kind": "local"}, minder=ProcessId.own())

    assert store.load(created.id) == updated
    assert updated.launch == ProcessId.own() and updated.is_attended


def test_ids_and_folders_are_the_agreed_ones(store: RecordStore) -> None:
    record = store.create()

    assert ID_PATTERN.fullmatch(record.id) and len(record.id) <= 20
    assert store.path(record.id).stat().st_mode & 0o077 == 0
    assert store.folder(record.id).stat().st_mode & 0o077 == 0


def test_g09_two_concurrent_launches_with_a_name_make_one_run(tmp_path: Path, store: RecordStore) -> None:
    with ThreadPoolExecutor(6) as pool:
        ended = pool.map(lambda _: _run(tmp_path, "create", "same"), range(6))
        said = sorted(done.stdout.strip() for done in ended)

    assert [record.name for record in store.list()] == ["same"]
    assert said == sorted([store.list()[0].id, *[f"refused {store.list()[0].id}"] * 5])


def test_g09_launches_without_a_name_share_nothing(tmp_path: Path, store: RecordStore) -> None:
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: _run(tmp_path, "create"), range(3)))

    assert len({record.id for record in store.list()}) == 3


def test_a_second_live_run_of_a_name_is_refused_with_what_to_do(store: RecordStore) -> None:
    first = store.create(name="x")

    with pytest.raises(LiveNameError) as refused:
        store.create(name="x")
    assert refused.value.record == first and refused.value.exit_code == 2
    assert "launch status x" in str(refused.value.hint)


def test_a_name_is_free_again_only_when_the_run_is_proven_down(store: RecordStore) -> None:
    first = store.create(name="x")
    store.update(first.id, state="unverified")
    with pytest.raises(LiveNameError):
        store.create(name="x")

    store.update(first.id, state="verified")
    second = store.create(name="x")
    assert store.load("x") == second and store.load(first.id).id == first.id


@pytest.mark.parametrize("name", ["", "A", "-a", "a-", "a b", "ä", "a" * 41, "slip-0123abcd", "../x"])
def test_what_cannot_be_a_name_is_refused(store: RecordStore, name: str) -> None:
    with pytest.raises(UsageError, match="is not a valid run name"):
        store.create(name=name)


def test_an_unknown_run_is_an_error_with_a_suggestion(store: RecordStore) -> None:
    store.create(name="quick")

    with pytest.raises(UsageError) as unknown:
        store.load("quikc")
    assert "quick" in str(unknown.value.why)


def test_updates_of_two_processes_are_both_kept(tmp_path: Path, store: RecordStore) -> None:
    run_id = store.create().id
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda field: _run(tmp_path, "count", run_id, field), ["reason", "url"]))

    record = store.load(run_id)
    assert (record.reason, record.url) == ("39", "39")


def test_a_kill_at_any_instant_leaves_a_whole_record(tmp_path: Path, store: RecordStore) -> None:
    run_id = store.create().id
    command = _command(tmp_path, "write-for-ever", run_id)
    for _ in range(6):
        with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None and writer.stdout.readline() == b"going\n"
            time.sleep(0.005 + os.urandom(1)[0] / 10000)
            writer.kill()
        store.load(run_id)
    assert not store.unreadable()


def test_a_crash_between_the_folder_and_the_record_harms_nothing(store: RecordStore) -> None:
    (store.runs / "slip-00000000").mkdir(parents=True)
    record = store.create(name="x")

    assert store.list() == [record] and not store.unreadable()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"schema": 1}', '{"schema": 2, "id": "slip-00000000"}']
)
def test_an_unreadable_record_is_reported_and_not_fatal(store: RecordStore, text: str) -> None:
    record = store.create(name="x")
    broken = store.create().id
    store.path(broken).write_text(text)

    assert store.list() == [record]
    assert [(unreadable.id, bool(unreadable.why)) for unreadable in store.unreadable()] == [(broken, True)]
    with pytest.raises(LaunchError, match="cannot be read"):
        store.load(broken)


def test_keys_of_a_later_version_are_ignored(store: RecordStore) -> None:
    record = store.create()
    text = store.path(record.id).read_text()
    store.path(record.id).write_text(text.replace("{", '{"invented": 1,', 1))

    assert store.load(record.id) == record


def test_a_run_that_is_over_begins_another_life_under_its_own_id(store: RecordStore) -> None:
    first = store.create(name="x", command=("a",))
    store.update(first.id, state="verified", ended=1.0, ended_by="guardian", exit_code=3, reason="killed")
    again = store.reopen(first.id, command=("b",))

    assert (again.id, again.name, again.created, again.command) == (first.id, "x", first.created, ("b",))
    assert again.live and again.is_attended and again.state == "created"
    assert (again.ended, again.ended_by, again.exit_code, again.reason) == (None, None, None, None)
    assert store.load(first.id) == again


def test_a_run_that_lives_is_not_begun_again(store: RecordStore) -> None:
    record = store.create(name="x")
    with pytest.raises(LiveRunError) as refused:
        store.reopen(record.id)
    assert refused.value.exit_code == 2 and "launch down x" in str(refused.value.hint)


def test_two_that_take_up_the_same_run_at_once_are_one(tmp_path: Path, store: RecordStore) -> None:
    record = store.create()
    store.update(record.id, state="verified")

    def resume(_: int) -> str:
        try:
            return store.reopen(record.id).state
        except LiveRunError:
            return "refused"

    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(resume, range(8))) == ["created"] + ["refused"] * 7


def test_a_name_that_another_run_has_by_now_keeps_the_old_one_down(store: RecordStore) -> None:
    old = store.create(name="x")
    store.update(old.id, state="verified")
    store.create(name="x")
    with pytest.raises(LiveNameError):
        store.reopen(old.id)
