"""durable.py, background_copy.py: what is at home is whole, enough to resume from, and not far behind."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.base.errors import NotPulled, PreflightError
from launcher.results import checkpoints, durable, results_copy, whole_checkpoints
from launcher.results.background_copy import BackgroundCopy
from launcher.types.durability import MAX_STEPS_BEHIND, DurabilityStatus
from launcher.types.machine import Stopped, never_stopped
from runtime.gateway.steps.rewind import Rewind
from runtime.shared.start_adapter_layout import FILES
from tests.support.committed import commit, name_best, pin
from tests.support.environment import PROGRAMS, REPOSITORY
from tests.support.pretend_machine import PretendMachine
from tests.support.waiting import wait_until

pytestmark = pytest.mark.process


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "machine"
    folder.mkdir()
    return folder


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return tmp_path / "results"


def rewind_of(state_dir: Path) -> Rewind:
    """As the runtime reads it, but for its time."""
    rewind = Rewind.read(state_dir)
    assert rewind is not None and rewind.time is not None
    return replace(rewind, time=None)


def _durable(results: Path) -> list[str]:
    return sorted(path.name for path in (results / "durable").iterdir())


def test_the_newest_and_the_pinned_checkpoints_become_durable_with_every_file(
    state_dir: Path, results: Path
) -> None:
    for step in (1, 2, 3, 4):
        commit(state_dir, step)
    pin(state_dir, 1, 3)
    assert results_copy.make_durable(state_dir, results) == DurabilityStatus(4, 4)

    assert _durable(results) == ["pinned.json", "step-000001", "step-000003", "step-000004"]
    for name in ("step-000001", "step-000003", "step-000004"):
        for path in (state_dir / "checkpoints" / name).rglob("*"):
            if path.is_file():
                home = results / "durable" / path.relative_to(state_dir / "checkpoints")
                assert home.read_bytes() == path.read_bytes()
    assert whole_checkpoints.newest_whole(results / "durable") == "step-000004"


def test_a_local_run_has_its_durable_bytes_once_on_the_disk(state_dir: Path, results: Path) -> None:
    folder = commit(state_dir, 1)
    results_copy.make_durable(state_dir, results)

    assert (folder / "optimizer.safetensors").stat().st_nlink == 2
    shutil.rmtree(state_dir)
    assert whole_checkpoints.newest_whole(results / "durable") == "step-000001"


def test_where_the_disk_has_no_links_it_is_a_copy(
    state_dir: Path, results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    folder = commit(state_dir, 1)
    results_copy.make_durable(state_dir, results)

    assert (folder / "optimizer.safetensors").stat().st_nlink == 1
    assert whole_checkpoints.newest_whole(results / "durable") == "step-000001"


def test_a_new_step_takes_the_place_of_the_one_before(state_dir: Path, results: Path) -> None:
    for step in (1, 2, 3):
        commit(state_dir, step)
        assert results_copy.make_durable(state_dir, results).durable == step
        assert _durable(results) == [f"step-{step:06d}"]
    assert not list(results.glob(".incoming-*"))


def test_a_checkpoint_pinned_later_is_brought_as_well(state_dir: Path, results: Path) -> None:
    commit(state_dir, 1)
    commit(state_dir, 2)
    results_copy.make_durable(state_dir, results)
    pin(state_dir, 1)
    assert not durable.is_current(state_dir, results)
    results_copy.make_durable(state_dir, results)
    assert _durable(results) == ["pinned.json", "step-000001", "step-000002"]
    assert durable.is_current(state_dir, results)


def test_c54_what_was_named_best_survives_the_machine(state_dir: Path, results: Path, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        commit(state_dir, step)
    pin(state_dir, 1, 2)
    results_copy.make_durable(state_dir, results)
    name_best(state_dir, 1, "a compile")
    assert not durable.is_current(state_dir, results)
    results_copy.make_durable(state_dir, results)
    assert durable.is_current(state_dir, results)

    another = tmp_path / "another machine"
    another.mkdir()
    durable.restore(results, another)
    results_copy.pull(another, results)
    assert json.loads((results / "best" / "state.json").read_text())["step"] == 1


@pytest.mark.parametrize("damage", ["flip", "missing", "manifest"])
def test_g20_what_is_durable_stays_until_the_next_one_is_whole(
    state_dir: Path, results: Path, damage: str
) -> None:
    commit(state_dir, 1)
    results_copy.make_durable(state_dir, results)
    broken = commit(state_dir, 2)
    if damage == "flip":
        content = (broken / "optimizer.safetensors").read_bytes()
        (broken / "optimizer.safetensors").write_bytes(bytes([content[0] ^ 1]) + content[1:])
    elif damage == "missing":
        (broken / "optimizer.safetensors").unlink()
    else:
        (broken / "manifest.json").write_text("{")
    standing = results_copy.make_durable(state_dir, results)

    assert (standing.committed, standing.durable, standing.steps_behind) == (2, 1, 1)
    assert _durable(results) == ["step-000001"]


def test_a_step_taken_again_after_a_rewind_replaces_its_namesake(state_dir: Path, results: Path) -> None:
    commit(state_dir, 1)
    results_copy.make_durable(state_dir, results)
    shutil.rmtree(state_dir / "checkpoints")
    again = commit(state_dir, 1, b"another")
    results_copy.make_durable(state_dir, results)
    home = results / "durable" / "step-000001" / "adapter" / "adapter_model.safetensors"
    assert home.read_bytes() == (again / "adapter" / "adapter_model.safetensors").read_bytes()


def test_a_kill_at_any_instant_of_securing_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    program = PROGRAMS / "unit" / "secure_for_ever.py"
    state_dir, results = tmp_path / "machine", tmp_path / "results"
    commit(state_dir, 1)
    results_copy.make_durable(state_dir, results)
    step = 2
    for number in range(6):
        process = subprocess.Popen(
            [sys.executable, program, state_dir, results, str(step)],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.02 + 0.013 * number)  # where it is hit does not matter, that it differs does
        process.kill()
        process.wait()
        process.stdout.close()
        newest = whole_checkpoints.newest_whole(results / "durable")
        committed = whole_checkpoints.newest_whole(state_dir / "checkpoints")
        assert newest is not None and committed is not None
        assert checkpoints.step_of(committed) - checkpoints.step_of(newest) <= MAX_STEPS_BEHIND
        step = checkpoints.step_of(committed) + 1
        shutil.rmtree(state_dir / "checkpoints" / f"step-{step:06d}", ignore_errors=True)


# ----------------------------------------------------------------- rewind


def test_a_new_machine_begins_at_the_durable_step_and_knows_that_it_was_rewound(
    state_dir: Path, results: Path
) -> None:
    for step in (1, 2, 3):
        commit(state_dir, step)
    pin(state_dir, 1)
    (state_dir / "metrics.jsonl").write_text('{"step": 3}\n')
    results_copy.make_durable(state_dir, results)
    fresh = state_dir.with_name("fresh")
    (fresh / "steps").mkdir(parents=True)
    (fresh / "samples").mkdir()
    (fresh / "serving.json").write_text("{}")
    for texts in (fresh / "logs" / "rollouts", results / "rollouts"):
        texts.mkdir(parents=True)
        for step in (3, 4):
            (texts / f"step-{step:06d}.jsonl").write_text("{}\n")
    assert durable.restore(results, fresh) == 3
    for texts in (fresh / "logs" / "rollouts", results / "rollouts"):
        assert [path.name for path in texts.iterdir()] == ["step-000003.jsonl"]
    shutil.rmtree(fresh / "logs")

    said = json.loads((fresh / "rewound.json").read_text())
    assert (said["to_step"], said["reused_after"], said["client_state"]) == (3, 3, {"done": 3})
    assert time.time() - said["time"] < 60
    assert sorted(path.name for path in fresh.iterdir()) == ["checkpoints", "metrics.jsonl", "rewound.json"]
    assert checkpoints.names(fresh / "checkpoints") == ["step-000003", "step-000001"]
    assert checkpoints.pinned(fresh / "checkpoints") == {"step-000001"}
    assert whole_checkpoints.newest_whole(fresh / "checkpoints") == "step-000003"
    weights = fresh / "checkpoints" / "step-000003" / "optimizer.safetensors"
    assert weights.stat().st_nlink == 1, "what is at home must not change with it"


def test_c55_after_several_losses_it_is_known_since_when_numbers_are_given_out_again(
    state_dir: Path, results: Path
) -> None:
    said = []
    for machine, steps in (("first", (1, 2, 3)), ("second", (4, 5))):
        there = state_dir.with_name(machine)
        for step in steps:
            commit(there, step)
        results_copy.make_durable(there, results)
        fresh = state_dir.with_name(f"after-the-{machine}")
        fresh.mkdir()
        durable.restore(results, fresh)
        said.append(json.loads((fresh / "rewound.json").read_text()))
    assert [(it["to_step"], it["reused_after"]) for it in said] == [(3, 3), (5, 3)]


def test_c55_a_loss_before_the_first_durable_step_goes_back_to_the_adapter_and_says_so(
    state_dir: Path, results: Path, tmp_path: Path
) -> None:
    """Where the run lived before: whoever waits for one of its steps is told, and a version's number alone
    may mean other weights by now."""
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for name in FILES:
        (adapter / name).write_text("{}")
    durable.save_initial_adapter(results, adapter)
    durable.restore(results, state_dir)
    assert Rewind.read(state_dir) is None, "in its first life there is nobody to tell"

    durable.mark_served(results)
    (state_dir / "steps" / "000001").mkdir(parents=True)
    assert durable.restore(results, state_dir) == 0
    assert rewind_of(state_dir) == Rewind(to_step=0, client_state=None, reused_after=0, time=None)
    assert sorted(path.name for path in state_dir.iterdir()) == ["rewound.json", "start"]

    for step in (1, 2, 3):
        commit(state_dir, step)
    results_copy.make_durable(state_dir, results)
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    assert durable.restore(results, fresh) == 3
    assert rewind_of(fresh) == Rewind(to_step=3, client_state={"done": 3}, reused_after=0, time=None)


def test_a_damaged_durable_checkpoint_is_passed_over(state_dir: Path, results: Path) -> None:
    commit(state_dir, 1)
    commit(state_dir, 2)
    pin(state_dir, 1)
    results_copy.make_durable(state_dir, results)
    (results / "durable" / "step-000002" / "optimizer.safetensors").write_bytes(b"no")
    fresh = state_dir.with_name("fresh")
    fresh.mkdir()
    assert durable.restore(results, fresh) == 1


def test_nothing_durable_is_an_error_and_nothing_is_removed(state_dir: Path, results: Path) -> None:
    (state_dir / "samples").mkdir()
    with pytest.raises(PreflightError, match="the run has no durable checkpoint"):
        durable.restore(results, state_dir)
    assert (state_dir / "samples").exists()


# ----------------------------------------------------------------- while the run lives


class _Reads:
    """How often what is committed was read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        really = durable.is_current
        monkeypatch.setattr(durable, "is_current", lambda *folders: self.noted() and really(*folders))

    def noted(self) -> bool:
        self.count += 1
        return True


def _long_ago(*folders: Path) -> None:
    """Nothing has changed in these for an hour."""
    at = time.time_ns() - 3600 * 10**9
    for folder in folders:
        os.utime(folder, ns=(at, at))


def test_what_is_durable_is_not_read_again_until_a_folder_is_touched(
    state_dir: Path, results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results_copy, "_READ_EVERY_SECONDS", 3600.0)
    reads, securing = _Reads(monkeypatch), results_copy.DurableWatcher(state_dir)
    commit(state_dir, 1)
    assert securing.look(results) == DurabilityStatus(1, 1)
    _long_ago(state_dir / "checkpoints", results / "durable")
    seen = [securing.look(results) for _ in range(5)]
    assert (seen, reads.count) == ([DurabilityStatus(1, 1)] * 5, 2)

    commit(state_dir, 2)
    assert securing.look(results) == DurabilityStatus(2, 2)
    _long_ago(state_dir / "checkpoints", results / "durable")
    securing.look(results)
    pin(state_dir, 1)
    securing.look(results)
    assert _durable(results) == ["pinned.json", "step-000001", "step-000002"]
    shutil.rmtree(results / "durable")
    assert securing.look(results) == DurabilityStatus(2, 2)
    assert _durable(results) == ["pinned.json", "step-000001", "step-000002"]


def test_what_changes_within_a_tick_of_the_disks_clock_is_seen(state_dir: Path, results: Path) -> None:
    securing, at = results_copy.DurableWatcher(state_dir), time.time_ns() + 10**10
    for step in (1, 2):
        commit(state_dir, step)
        os.utime(state_dir / "checkpoints", ns=(at, at))
        assert [securing.look(results).durable for _ in range(3)] == [step] * 3


def test_once_in_a_while_all_is_read_whatever_the_folders_times_say(
    state_dir: Path, results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results_copy, "_READ_EVERY_SECONDS", 0.0)
    reads, securing = _Reads(monkeypatch), results_copy.DurableWatcher(state_dir)
    commit(state_dir, 1)
    for _ in range(3):
        securing.look(results)
        _long_ago(state_dir / "checkpoints", results / "durable")
    assert reads.count == 3


class _Disk(PretendMachine):
    """A machine with a folder: its `make_durable` is the real one."""

    @functools.cached_property
    def securing(self) -> results_copy.DurableWatcher:
        return results_copy.DurableWatcher(self.folder)

    def committed(self) -> int | None:
        newest = whole_checkpoints.newest_whole(self.folder / "checkpoints")
        return None if newest is None else checkpoints.step_of(newest)

    def make_durable(self, into: Path, stopped: Stopped = never_stopped) -> DurabilityStatus:
        super().make_durable(into, stopped)
        return self.securing.look(into)


def test_each_committed_step_becomes_durable_while_the_run_lives(state_dir: Path, results: Path) -> None:
    background_copy = BackgroundCopy(_Disk(state_dir), results, look_every_seconds=0.01)
    background_copy.start()
    try:
        for step in (1, 2, 3):
            commit(state_dir, step)
            wait_until(lambda: background_copy.latest().durable == step, what="the step is durable")  # noqa: B023
            assert background_copy.latest().steps_behind == 0
    finally:
        background_copy.stop()
    commit(state_dir, 4)
    assert durable.newest_step(results) == 3


def test_falling_behind_is_known_with_its_reason_and_is_caught_up(
    state_dir: Path, results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.results.background_copy._BACKOFF_SECONDS", 0.01)
    refuse = NotPulled("the disk is full", "0 bytes free")
    machine = _Disk(state_dir)
    full = {"full": True}

    def make_durable() -> None:
        if full["full"]:
            raise refuse

    machine.acts["make_durable"] = make_durable
    background_copy = BackgroundCopy(machine, results, look_every_seconds=0.01)
    background_copy.start()
    try:
        commit(state_dir, 1)
        commit(state_dir, 2)
        wait_until(lambda: background_copy.latest().steps_behind == 2, what="two steps behind")
        now = background_copy.latest()
        assert now.steps_behind > now.bound_steps
        assert now.trouble == "the disk is full (0 bytes free)"
        assert now.describe() == "committed step 2, nothing durable (at most 1 behind, 2 behind)"
        full["full"] = False
        wait_until(lambda: background_copy.latest() == DurabilityStatus(2, 2), what="caught up")
    finally:
        background_copy.stop()


def test_a_checkpoint_that_is_broken_is_not_read_again_and_again(
    state_dir: Path, results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = _Disk(state_dir)
    looks: list[float] = []
    machine.acts["make_durable"] = lambda: looks.append(time.monotonic())
    commit(state_dir, 1)
    (commit(state_dir, 2) / "optimizer.safetensors").write_bytes(b"cut")
    background_copy = BackgroundCopy(machine, results, look_every_seconds=0.01)
    background_copy.start()
    try:
        wait_until(lambda: background_copy.latest().trouble, what="it is known")
        assert (
            background_copy.latest().trouble
            == "step-000002: optimizer.safetensors does not match its manifest"
        )
        assert (background_copy.latest().committed, background_copy.latest().durable) == (2, 1)
        wait_until(lambda: len(looks) >= 2 and time.monotonic() - looks[-1] > 0.3, what="it is let rest")
        assert len(looks) <= 3
    finally:
        background_copy.stop()


def test_g22_at_the_end_of_a_run_a_slow_copy_is_broken_off_for_the_pull(
    state_dir: Path, results: Path
) -> None:
    begun = threading.Event()

    class Slow(_Disk):
        def make_durable(self, into: Path, stopped: Stopped = never_stopped) -> DurabilityStatus:
            begun.set()
            wait_until(stopped, what="it is broken off")
            raise NotPulled("it was broken off", "the run ends")

    background_copy = BackgroundCopy(Slow(state_dir), results, look_every_seconds=0.01)
    background_copy.start()
    assert begun.wait(120)
    background_copy.stop()
    assert not background_copy._thread.is_alive(), "it goes on beside the pull, at the rate of a live run"
