"""How far a copy is, shown by `launch pull`, `launch down` and the end of a run; rarely if nobody looks."""

from __future__ import annotations

import contextlib
import io
import json
import os
from pathlib import Path

import pytest

from launcher.base.home import Home
from launcher.cli import run_verbs, teardown_verbs
from launcher.console import output
from launcher.console.output import Output
from launcher.records import teardown_lock
from launcher.records.records import RecordStore
from tests.support import recorded_machine
from tests.support.lived import Lives
from tests.support.waiting import wait_until

SAID = "1 MB of 2 MB"


def test_g22_a_verb_that_copies_says_how_far_it_is_now_and_then_and_stdout_has_the_answer_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(output, "QUIET_SECONDS", 0.02)
    stdout, stderr = io.StringIO(), io.StringIO()
    said = Output(as_json=True, stdout=stdout, stderr=stderr, environ={})
    with said.busy("copying the results of dev", "or waiting") as progress:
        wait_until(lambda: " · or waiting\n" in stderr.getvalue(), what="a word")
        progress("120 MB of 450 MB, 2.4 MB/s, 2m 17s left")
        wait_until(lambda: "2.4 MB/s" in stderr.getvalue(), what="how far it is")
    assert stderr.getvalue().startswith("copying the results of dev, 0.")
    said.result({"into": "x"}, "")
    assert json.loads(stdout.getvalue())["into"] == "x"
    before = len(stderr.getvalue())
    progress("nothing any more")
    assert len(stderr.getvalue()) == before


@pytest.mark.process
@pytest.mark.parametrize("verb", ["pull", "down"])
def test_g22_a_rented_run_is_brought_home_with_its_progress(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded_machine.register()
    monkeypatch.setenv("LAUNCH_HOME", str(tmp_path / "home"))
    store = RecordStore(Home.find())
    record = store.create(name="dev")
    store.update(record.id, state="work", launch=None, machine=recorded_machine.describe(tmp_path / "m", 1.0))
    heard: list[str] = []

    @contextlib.contextmanager
    def busy(self: Output, what: str, detail: str = ""):
        yield heard.append

    monkeypatch.setattr(Output, "busy", busy)
    said = Output(stdout=io.StringIO(), stderr=io.StringIO(), environ={})
    assert (run_verbs.pull(said, "dev") if verb == "pull" else teardown_verbs.down(said, "dev")) == 0
    assert heard == [SAID]


@pytest.mark.slow
def test_g22_the_end_of_a_run_says_how_far_its_results_are(live: Lives) -> None:
    lived = live()
    assert f"pull: {SAID}" in (lived.folder / "launch.log").read_text()


def test_g28_whoever_waits_for_an_end_knows_how_far_the_copy_is_and_a_broken_screen_ends_none(
    tmp_path: Path,
) -> None:
    def broken(line: str) -> None:
        raise ValueError("I/O operation on closed file")

    with teardown_lock.exclusive(tmp_path, "launch", broken) as turn:
        turn.reporting("copying results", broken)(SAID)
        holder = teardown_lock.owner(tmp_path)
        assert holder is not None and holder.doing == f"copying results: {SAID}"


def test_g28_whoever_waits_is_told_of_a_copy_now_and_then_and_not_of_each_of_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    with contextlib.ExitStack() as first:
        turn = first.enter_context(teardown_lock.exclusive(tmp_path, "launch", said.append))
        tell = turn.reporting("copying results", lambda line: None)
        now = 0.0

        class Clock:
            @staticmethod
            def monotonic() -> float:
                return now

            @staticmethod
            def sleep(seconds: float) -> None:
                nonlocal now
                now += 1.0
                tell(f"{now:.0f} MB of 50 MB")
                if now == 50:
                    first.close()

        tell("0 MB of 50 MB")
        monkeypatch.setattr(teardown_lock, "time", Clock)
        with teardown_lock.exclusive(tmp_path, "down", said.append):
            pass
    assert len(said) == 3, said
    holder = f"launch (pid {os.getpid()}) is ending it"
    assert said[1].endswith(f"{holder}: copying results: 21 MB of 50 MB; waiting")
