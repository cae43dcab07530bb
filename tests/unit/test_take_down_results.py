"""A run that is ended without its launch: its machine is kept for its results until those are given up.

By `launch down` or `launch gc`, which try for a minute. A guardian: `test_take_down_guardian.py`. A launch
that is there: `test_ending_results.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launcher.base.errors import NotPulled
from launcher.cli import teardown_verbs
from launcher.records.records import RecordStore, RunRecord
from launcher.results import background_copy, trackio_process
from launcher.run.resume_point import prepare_resume
from launcher.teardown import abandon_results, take_down
from tests.support import recorded_machine
from tests.support.left_alone import left_alone, store, there, typed
from tests.support.typed import Typed

__all__ = ["store", "there", "typed"]

pytestmark = pytest.mark.process

# Before the tests make it short.
AS_IT_IS = take_down.TRIES_SECONDS


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
    assert "its newest results are lost with it: the user gave them up" in done.stderr
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
    monkeypatch.setattr(
        take_down, "pull_with_retries", lambda machine, into, seconds, *_: tried.append(seconds)
    )
    monkeypatch.setattr(
        abandon_results, "after_grace", lambda seconds, given_up: tried.append(seconds) or given_up
    )
    with pytest.raises(NotPulled):
        take_down.take_down(store, record, "down")
    assert tried == [60.0, 60.0]
    assert teardown_verbs._KEEPING_SECONDS == 60.0, "and whoever typed it waits with a launch for as long"


def test_g29_results_that_are_given_up_while_they_are_tried_for_go_with_their_machine(
    typed: Typed, store: RecordStore, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = left_alone(store, there)
    (there / "pull-fails").touch()
    tries = background_copy.pull_with_retries

    def given_up_meanwhile(*words: Any) -> None:
        store.update(record.id, given_up=True)
        assert tries(*words) is None

    monkeypatch.setattr(take_down, "TRIES_SECONDS", 3600.0)
    monkeypatch.setattr(take_down, "pull_with_retries", given_up_meanwhile)
    done = typed("gc", "--yes")
    assert done.returncode == 0, done.stderr
    assert "its newest results are lost with it: the user gave them up" in done.stderr
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
    lost = "the machine is gone, with everything after step 3"
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
        prepare_resume(store, store.load("dev"), lambda record: pytest.fail("not asked"), lambda line: None)


@pytest.mark.parametrize("words", [["down", "dev"], ["gc", "--yes"]], ids=" ".join)
def test_g29_trackio_is_written_when_every_machine_is_down(
    typed: Typed, store: RecordStore, there: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    """Its file may be locked for as long as it likes: no machine is paid for meanwhile."""
    runs = [left_alone(store, there).id]
    if words[0] == "gc":
        store.update(runs[0], name="other")
        runs.append(left_alone(store, there.with_name("there2")).id)
    states: list[tuple[str, list[bool]]] = []

    def write(record: RunRecord, note: object) -> None:
        states.append((record.id, [store.load(it).live for it in runs]))

    monkeypatch.setattr(trackio_process, "write", write)
    done = typed(*words)
    assert done.returncode == 0, done.stderr
    assert sorted(states) == sorted((it, [False] * len(runs)) for it in runs)
