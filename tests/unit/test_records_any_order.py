"""The records of runs in any order: begun, changed, ended, resumed, by processes any of which may die.

The store, its locks, the teardown and its lock are real; the machines are folders (recorded_machine.py), a
launch is a process that sleeps, and both clocks are the test's. Each process is killed before one of its
changes of the disk, or another comes in between there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from launcher.base import clock, locks
from launcher.base.errors import TeardownUnverified
from launcher.base.home import Home
from launcher.base.process_location import ProcessLocation
from launcher.base.processes import ProcessId
from launcher.config import resume_source
from launcher.records import heartbeat, lives, records, teardown_lock
from launcher.records.lives import Life
from launcher.records.records import LiveNameError, LiveRunError, RecordStore, RunRecord
from launcher.records.teardown_lock import LockOwner
from launcher.teardown import take_down
from tests.support import recorded_machine
from tests.support.dying_process import DyingProcess, leave_torn, memory_folder

THERE = ProcessLocation("another", "another boot", "pid:[1]", "gpubox")
GONE = ProcessId(2**22, "long ago")
NAMES = st.sampled_from(["a", "a", "a", None, "b"])
# Of the runs there are: mostly the first.
PLACES = st.sampled_from([0, 0, 0, 1, 1, 2, 3])
PRICES = st.sampled_from([0.0, 1.5, 12.0])
# Before which of its changes a process dies, or another one comes: mostly before none.
WHEN = st.sampled_from([None] * 10 + [*range(1, 9)])
OTHERS = st.sampled_from(["changes", "begins", "resumes", "ends"])
ACTS = st.sampled_from(
    ["launch"] * 2 + ["change"] * 2 + ["end"] * 4 + ["resume"] * 3
    + ["be elsewhere", "launch dies", "pass time", "pass time"]
)  # fmt: skip


class _BusyError(Exception):
    """Another process ends the run."""


@dataclass
class Run:
    """A run as its user knows it: the record of the last answer, its launch, and what it has cost."""

    record: RunRecord
    launch: subprocess.Popen[bytes]
    cost: float = 0.0
    earlier: list[Life] = field(default_factory=list)


class RecordsInAnyOrder(RuleBasedStateMachine):
    """A home, and the processes that use it."""

    @initialize()
    def begin(self) -> None:
        self.folder = memory_folder()
        self.store = RecordStore(Home(self.folder / "home", self.folder, self.folder))
        self.store.runs.mkdir(parents=True)
        self.there = self.folder / "there"
        self.runs: dict[str, Run] = {}
        self.launches: list[subprocess.Popen[bytes]] = []
        # What another process saw that came between: an error of its own there would look like the disk's.
        self.seen: list[AssertionError] = []
        self.wall, self.boot = time.time(), clock.boot_seconds()
        self.patch = pytest.MonkeyPatch()
        played = SimpleNamespace(time=lambda: self.wall, monotonic=time.monotonic, sleep=time.sleep)
        for module in (records, take_down, clock):
            self.patch.setattr(module, "time", played)
        self.patch.setattr(clock, "boot_seconds", lambda: self.boot)
        self.patch.setattr(locks, "OWNER_SECONDS", 0.0)
        self.patch.setattr(locks, "_POLL_SECONDS", 0.0)
        recorded_machine.register()

    # ------------------------------------------------------------- what processes do

    @rule(
        act=ACTS, place=PLACES, name=NAMES, price=PRICES, state=st.sampled_from(["arm", "serve", "work"]),
        who=st.sampled_from(["down", "gc", "resume"]), is_proven=st.sampled_from([True, True, False]),
        dies=WHEN, comes=WHEN, other=OTHERS, torn=st.floats(0, 1), is_silent=st.booleans(),
        hours=st.integers(1, 5), is_set=st.sampled_from([0, 0, 6, -6]),
    )  # fmt: skip
    def go_on(self, act: str, place: int, dies: int | None, comes: int | None, **drawn: Any) -> None:
        """One rule: of several, Hypothesis leaves some out of an example, which would come to little."""
        is_disturbed = {"dies": dies, "comes": comes, "torn": drawn["torn"]}
        among = {"place": place, "other": drawn["other"]}
        {
            "launch": lambda: self.launch(drawn["name"], drawn["price"], **is_disturbed),
            "change": lambda: self.change(state=drawn["state"], **among, **is_disturbed),
            "end": lambda: self.end(who=drawn["who"], is_proven=drawn["is_proven"], **among, **is_disturbed),
            "resume": lambda: self.resume(price=drawn["price"], **among, **is_disturbed),
            "be elsewhere": lambda: self.be_elsewhere(place, drawn["is_silent"]),
            "launch dies": lambda: self.launch_dies(place),
            "pass time": lambda: self.pass_time(drawn["hours"], drawn["is_set"]),
        }[act]()

    def launch(
        self, name: str | None, price: float, dies: int | None, comes: int | None, torn: float
    ) -> None:
        """A run begins, unless a live one has its name; at the same moment another may want the name."""
        launch = self._sleeper()
        another = self._sleeper()
        process = self._process(dies, comes, lambda: self._come(lambda: self._create(name, 1.0, another)))
        with process.at_work():
            self._create(name, price, launch)
        if process.is_dead:
            leave_torn(self.store.runs, torn)
            for record in self.store.list():  # nobody was told its id
                if record.id not in self.runs:
                    assert record.launch == ProcessId.of(launch.pid) and self._is_free(name)
                    self.runs[record.id] = Run(record, launch)
        self._raise_what_was_seen()

    def change(
        self, place: int, state: str, dies: int | None, comes: int | None, other: str, torn: float
    ) -> None:
        """The launch of a live run notes how far it is."""
        if (run := self._run(place)) is None or not run.record.live:
            return
        run_id, changes = run.record.id, {"state": state, "url": f"http://{state}", "minder": GONE}

        def work() -> None:
            changed = self.store.update(run_id, **changes)
            assert changed == replace(run.record, **changes), "and nothing of anybody else's is lost"
            run.record = changed

        self._do(run, work, lambda record: replace(record, **changes), dies, comes, other, torn)

    def end(
        self,
        place: int,
        who: str,
        is_proven: bool,
        dies: int | None,
        comes: int | None,
        other: str,
        torn: float,
    ) -> None:
        """A run is ended, whatever becomes of it; what is over stays as it is."""
        if (run := self._run(place)) is None:
            return
        unproven = self.there / "unproven"
        unproven.unlink(missing_ok=True)
        if not is_proven:
            unproven.touch()

        def ended(record: RunRecord) -> RunRecord:
            if not record.live:
                return record
            proof = recorded_machine.RecordedMachine(self.there).proof()
            state = "verified" if is_proven else "unverified"
            return replace(record, state=state, proof=proof.to_dict(), ended=self._now(record), ended_by=who)

        def work() -> None:
            with contextlib.suppress(TeardownUnverified):
                take_down.take_down(self.store, self.store.load(run.record.id), who)
                assert is_proven or not run.record.live
            after = self.store.load(run.record.id)
            assert after == ended(run.record)
            run.record = after

        self._do(run, work, ended, dies, comes, other, torn)

    def resume(
        self, place: int, price: float, dies: int | None, comes: int | None, other: str, torn: float
    ) -> None:
        """A run that is over has another life; one that is not, or whose name is taken, has none."""
        if (run := self._run(place)) is None:
            return

        launch = self._sleeper()

        def work() -> None:
            self._reopen(run, price, launch)

        def resumed(record: RunRecord) -> RunRecord:
            return self._reopened(record, price, launch)

        self._do(run, work, resumed, dies, comes, other, torn)

    def be_elsewhere(self, place: int, is_silent: bool) -> None:
        """Its processes are of another computer, which may be silent. It is nobody's to end but by name."""
        if (run := self._run(place)) is None or not run.record.live:
            return
        run.record = self.store.update(run.record.id, place=THERE)
        run.cost = 0.0  # from here on it is counted by another clock
        beat = run.record.folder / heartbeat.FILE
        beat.touch()
        os.utime(beat, (0, 0) if is_silent else None)
        assert run.record.elsewhere and run.record.silent == is_silent
        if is_silent:
            after = take_down.close_unseen(self.store, run.record)
            assert after.state == "verified" and after.ended == self.wall
            run.record = after
        else:
            with pytest.raises(TeardownUnverified):
                take_down.close_unseen(self.store, run.record)

    def launch_dies(self, place: int) -> None:
        """A launch is killed; its run lives on until somebody ends it."""
        if (run := self._run(place)) is not None:
            run.launch.kill()
            run.launch.wait()

    def pass_time(self, hours: int, is_set: int) -> None:
        """And the wall clock may be set."""
        self.boot += 3600 * hours
        self.wall += 3600 * (hours + is_set)

    # ------------------------------------------------------------- what is always so

    @invariant()
    def the_records_are_what_their_users_were_told(self) -> None:
        assert not self.store.unreadable()
        listed = self.store.list()
        expected = sorted((run.record for run in self.runs.values()), key=lambda it: (it.created, it.id))
        assert list(listed) == expected
        names = [record.name for record in listed if record.live and record.name]
        assert len(names) == len(set(names)), "one live run of a name"
        for record in listed:
            assert teardown_lock.owner(record.folder) is None, "nobody ends it now"
        for name in set(names):
            assert self.store.load(name).live

    @invariant()
    def an_end_has_its_proof(self) -> None:
        for run in self.runs.values():
            record = run.record
            proof = record.proof or {"verified": None}
            assert record.live == (proof["verified"] is not True)
            if record.state in records.ENDS:
                assert proof["verified"] is (record.state == "verified")
                assert record.ended is not None and record.ended_by is not None

    @invariant()
    def who_attends_it_is_known(self) -> None:
        for run in self.runs.values():
            record, is_alive = run.record, run.launch.poll() is None
            is_elsewhere = record.live and record.place == THERE
            assert record.elsewhere == is_elsewhere
            assert record.launch_alive == (is_alive and not is_elsewhere)
            assert record.is_attended == (is_alive or is_elsewhere)
            refused = record.live and (is_elsewhere or is_alive)
            with pytest.raises(LiveRunError) if refused else contextlib.nullcontext():
                resume_source.find(self.store, record.id)

    @invariant()
    def money_is_only_ever_added(self) -> None:
        for run in self.runs.values():
            record = run.record
            earlier = list(record.earlier_lives)
            assert earlier[: len(run.earlier)] == run.earlier, "what an earlier life has cost stays"
            assert all(life.ended is not None for life in earlier)
            run.earlier = earlier
            if record.place == THERE:
                continue  # by its own wall clock
            cost = lives.cost(record.lives, record.now())
            assert cost >= run.cost - 1e-6
            run.cost = cost

    def teardown(self) -> None:
        if hasattr(self, "patch"):
            self.patch.undo()
            for launch in self.launches:
                launch.kill()
                launch.wait()
            shutil.rmtree(self.folder)

    # ------------------------------------------------------------- how it is done

    def _run(self, place: int) -> Run | None:
        return list(self.runs.values())[place % len(self.runs)] if self.runs else None

    def _sleeper(self) -> subprocess.Popen[bytes]:
        self.launches.append(subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL))
        return self.launches[-1]

    def _now(self, record: RunRecord) -> float:
        """The time by the clock of the record's newest life."""
        if record.place == THERE or record.begun_boot is None:
            return self.wall
        return record.life.begun + self.boot - record.begun_boot

    def _is_free(self, name: str | None, but: str = "") -> bool:
        others = [run.record for run in self.runs.values() if run.record.id != but]
        return name is None or not any(record.live and record.name == name for record in others)

    def _create(self, name: str | None, price: float, launch: subprocess.Popen[bytes]) -> None:
        own, machine = ProcessId.of(launch.pid), recorded_machine.describe(self.there, price)
        try:
            record = self.store.create(name=name, launch=own, machine=machine)
        except LiveNameError:
            assert not self._is_free(name)
            return
        assert self._is_free(name) and record.id not in self.runs
        self.runs[record.id] = Run(record, launch)

    def _reopened(self, record: RunRecord, price: float, launch: subprocess.Popen[bytes]) -> RunRecord:
        """The record of its next life."""
        kept = {name: getattr(record, name) for name in ("name", "command", "details", "folder")}
        return RunRecord(
            record.id, record.created, **kept, launch=ProcessId.of(launch.pid), place=ProcessLocation.here(),
            begun=self.wall, begun_boot=self.boot, earlier_lives=record.lives,
            machine=recorded_machine.describe(self.there, price),
        )  # fmt: skip

    def _reopen(self, run: Run, price: float, launch: subprocess.Popen[bytes]) -> None:
        own, machine = ProcessId.of(launch.pid), recorded_machine.describe(self.there, price)
        try:
            again = self.store.reopen(run.record.id, launch=own, machine=machine)
        except LiveRunError:
            assert run.record.live
        except LiveNameError:
            assert not self._is_free(run.record.name, run.record.id)
        else:
            assert not run.record.live and self._is_free(run.record.name, run.record.id)
            assert again == self._reopened(run.record, price, launch)
            run.record, run.launch = again, launch

    def _do(
        self,
        run: Run,
        work: Callable[[], None],
        after: Callable[[RunRecord], RunRecord],
        dies: int | None,
        comes: int | None,
        other: str,
        torn: float,
    ) -> None:
        """One process's work on a run. Where it dies, the record is as before or as after."""
        process = self._process(dies, comes, lambda: self._come_between(run, other))
        with process.at_work():
            work()
        self._raise_what_was_seen()
        if not process.is_dead:
            return
        leave_torn(self.store.runs, torn)
        self._leave_lock_of_a_dead_process(run)
        found = self.store.load(run.record.id)
        if found != run.record:
            assert found == after(run.record)
            if found.launch != run.record.launch:
                run.launch = next(it for it in self.launches if ProcessId.of(it.pid) == found.launch)
            run.record = found

    def _process(self, dies: int | None, comes: int | None, come: Callable[[], None]) -> DyingProcess:
        process = DyingProcess(self.store.runs)
        if comes is not None:
            process.plan(comes, come)
        if dies is not None:
            process.plan(dies, process.kill)
        return process

    def _come_between(self, run: Run, other: str) -> None:
        """Another process, while one is at work: it does all of its own, or is told to wait."""
        act: Callable[[], None] = {
            "changes": lambda: self._note(run),
            "begins": lambda: self._create(run.record.name, 1.0, self._sleeper()),
            "resumes": lambda: self._reopen(run, 1.0, self._sleeper()),
            "ends": lambda: self._try_to_end(run),
        }[other]
        self._come(act)

    def _come(self, act: Callable[[], None]) -> None:
        try:
            with contextlib.suppress(TimeoutError):
                act()
        except AssertionError as error:
            self.seen.append(error)

    def _raise_what_was_seen(self) -> None:
        for error in self.seen:
            raise error

    def _note(self, run: Run) -> None:
        why = f"noted at {self.boot}"
        assert self.store.update(run.record.id, why=why).why == why
        run.record = replace(run.record, why=why)

    def _try_to_end(self, run: Run) -> None:
        """One at a time: whoever comes second sees who is at it."""

        def look(other: LockOwner | None) -> None:
            raise _BusyError

        is_held = teardown_lock.owner(run.record.folder) is not None
        try:
            with teardown_lock.exclusive(run.record.folder, "gc", lambda line: None, look=look):
                assert not is_held, "two end it at once"
        except _BusyError:
            pass

    def _leave_lock_of_a_dead_process(self, run: Run) -> None:
        """As a killed process leaves it: the system has freed the lock, the text has its name."""
        text = json.dumps(dataclasses.asdict(LockOwner("down", GONE, "down", ProcessLocation.here())))
        with (run.record.folder / teardown_lock.FILE).open("r+") as file:
            file.write(text)


@pytest.mark.process
def test_g09_p12_in_any_order_records_are_whole_and_every_life_is_paid() -> None:
    bounds = settings(
        max_examples=90, stateful_step_count=20, deadline=None, derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
    )  # fmt: skip
    run_state_machine_as_test(RecordsInAnyOrder, settings=bounds)
