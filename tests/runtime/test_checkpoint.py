"""Files that must be whole or absent: checkpoints, batches, the metrics of a run that was killed."""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import save_file

from runtime.shared.batch import Batch, BatchError, empty_batch, read_batch, step_folder, write_batch
from runtime.shared.checkpoint import ADAPTER_WEIGHTS, CheckpointError, CheckpointStore, checkpoint_name
from runtime.shared.metrics import MetricsLog
from tests.runtime.trainer_fixtures import make_batch, random_samples


def write_files(folder: Path, value: float = 1.0) -> None:
    (folder / "adapter").mkdir()
    save_file({"weight": np.full(64, value, np.float32)}, folder / ADAPTER_WEIGHTS)
    (folder / "adapter" / "adapter_config.json").write_text("{}")
    save_file({"moment": np.zeros(8, np.float32)}, folder / "optimizer.safetensors")


def commit(store: CheckpointStore, step: int) -> None:
    state = {"step": step, "client_state": {"at": step}, "metrics": {"reward": step / 10}}
    store.commit(step, step, state, lambda folder: write_files(folder, step))


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


def test_a_commit_is_found_again_with_all_it_was_given(store: CheckpointStore) -> None:
    assert store.newest() is None and store.list() == []
    for step in (1, 2):
        commit(store, step)
    newest = store.newest()
    assert newest is not None and (newest.name, newest.step, newest.version) == ("step-000002", 2, 2)
    assert newest.state["client_state"] == {"at": 2}
    listed = store.list()
    assert [info.name for info in listed] == ["step-000001", "step-000002"]
    assert listed[1].metrics == {"reward": 0.2} and not listed[1].pinned
    assert listed[1].bytes == sum(
        path.stat().st_size
        for path in newest.folder.rglob("*")
        if path.is_file() and path.name != "manifest.json"
    )


@pytest.mark.parametrize("moment", ["first file", "all files"])
def test_a_writer_killed_before_the_rename_leaves_no_checkpoint(store: CheckpointStore, moment: str) -> None:
    commit(store, 1)

    def die(folder: Path) -> None:
        if moment == "all files":
            write_files(folder)
        else:
            (folder / "adapter").mkdir()
        os.kill(os.getpid(), signal.SIGKILL)

    child = multiprocessing.get_context("fork").Process(target=store.commit, args=(2, 2, {}, die))
    child.start()
    child.join(30)
    assert child.exitcode == -signal.SIGKILL
    assert [path.name for path in store.root.glob(".tmp-*")]
    newest = store.newest()
    assert newest is not None and newest.name == "step-000001" and len(store.list()) == 1
    commit(store, 2)
    assert store.names() == ["step-000001", "step-000002"]
    assert not list(store.root.glob(".tmp-*"))


@pytest.mark.slow
def test_g20_a_writer_killed_at_random_instants_leaves_the_newest_checkpoint_whole(
    store: CheckpointStore,
) -> None:
    """A hundred kills. What is committed stays, two are kept, and the next writer goes on from the newest."""
    chance = random.Random(20)

    def write_on(announce: Any) -> None:
        newest = store.newest()
        for step in itertools.count(1 if newest is None else newest.step + 1):
            commit(store, step)
            announce.send(step)
            store.prune(2)

    announced = committed = 0
    for _ in range(100):
        hear, announce = multiprocessing.Pipe(duplex=False)
        child = multiprocessing.get_context("fork").Process(target=write_on, args=(announce,))
        child.start()
        announce.close()
        for _ in range(chance.randrange(3)):
            announced = hear.recv()
        child.join(chance.uniform(0, 0.02))
        child.kill()
        child.join()
        with contextlib.suppress(EOFError):
            while True:
                announced = hear.recv()
        whole = [store.load(name).step for name in store.names()]  # raises if one is not
        committed = whole[-1] if whole else 0
        assert committed - announced in (0, 1) and len(whole) >= min(committed, 2)
    assert committed >= 50
    commit(store, committed + 1)
    assert not list(store.root.glob(".tmp-*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "file",
    [
        ADAPTER_WEIGHTS,
        "adapter/adapter_config.json",
        "optimizer.safetensors",
        "state.json",
        "manifest.json",
    ],
)
def test_g20_with_any_bit_flipped_the_one_before_is_chosen_and_the_step_can_be_taken_again(
    store: CheckpointStore, file: str
) -> None:
    for step in (1, 2):
        commit(store, step)
    path = store.root / "step-000002" / file
    whole = path.read_bytes()
    for place in range(len(whole)):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        with pytest.raises(CheckpointError):
            store.load("step-000002")
    newest = store.newest()
    assert newest is not None and newest.name == "step-000001"
    commit(store, 2)
    newest = store.newest()
    assert newest is not None and newest.name == "step-000002"


@pytest.mark.slow
def test_g20_a_file_that_does_not_fit_leaves_the_one_before_and_no_debris(store: CheckpointStore) -> None:
    """Each file of a checkpoint in turn is the first that the kernel refuses to write on."""
    commit(store, 1)
    outcomes: list[bool] = []
    for most_bytes in range(0, 900, 25):
        reader, writer = multiprocessing.Pipe(duplex=False)

        def write(most_bytes: int = most_bytes, writer: Any = writer) -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
            try:
                commit(store, 2)
                writer.send("")
            except (OSError, SafetensorError) as error:
                writer.send(str(error))

        child = multiprocessing.get_context("fork").Process(target=write)
        child.start()
        writer.close()
        child.join(30)
        failed = "too large" in reader.recv()
        outcomes.append(not failed)
        assert child.exitcode == 0 and not list(store.root.glob(".tmp-*"))
        assert store.names() == (["step-000001"] if failed else ["step-000001", "step-000002"])
        if not failed:
            break
    assert outcomes.count(False) >= 10 and outcomes[-1]


def test_g20_a_full_disk_keeps_what_was_committed(tmp_path: Path) -> None:
    """On a real file system of 256 KiB, where this user may mount one; else the test above has to do."""
    small = tmp_path / "small"
    small.mkdir()
    mount = 'mount -t tmpfs -o size=256k none "$1" && exec "$2" -m tests.runtime.small_disk "$1"'
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", mount, "sh", small, sys.executable],
        capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    if done.returncode == 1 and ("unshare" in done.stderr or "mount" in done.stderr):
        return
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert "No space left" in said["error"] and said["debris"] == []
    assert said["whole"] == said["names"] and len(said["names"]) >= 2
    assert said["after_pruning"] == [*said["names"][-2:], f"step-{len(said['names']) + 1:06d}"]


def test_a_missing_file_or_a_manifest_of_another_step_is_not_whole(store: CheckpointStore) -> None:
    for step in (1, 2, 3):
        commit(store, step)
    (store.root / "step-000003" / "optimizer.safetensors").unlink()
    os.rename(store.root / "step-000002", store.root / "step-000004")
    newest = store.newest()
    assert newest is not None and newest.name == "step-000001"


def test_a_step_is_committed_once(store: CheckpointStore) -> None:
    commit(store, 1)
    before = store.load("step-000001").adapter_sha256
    with pytest.raises(FileExistsError):
        store.commit(1, 1, {}, lambda folder: write_files(folder, 9.0))
    assert store.load("step-000001").adapter_sha256 == before


def test_pruning_keeps_the_newest_and_the_pinned(store: CheckpointStore) -> None:
    for step in range(1, 7):
        commit(store, step)
    assert store.pin("step-000002").pinned
    assert store.prune(3) == ["step-000001", "step-000003"]
    assert store.names() == ["step-000002", "step-000004", "step-000005", "step-000006"]
    assert [info.name for info in store.list() if info.pinned] == ["step-000002"]
    assert store.prune(0) == ["step-000004"], "two are always kept"
    shutil.rmtree(store.root / "step-000006" / "adapter")
    commit(store, 7)
    assert store.prune(2) == [], "a broken one is not one of the two"
    assert not list(store.root.glob(".tmp-*"))


def test_while_pins_change_or_cannot_be_read_nothing_is_removed(store: CheckpointStore) -> None:
    for step in range(1, 5):
        commit(store, step)
    with store._retention_lock(0) as held, store._retention_lock(0) as second:
        assert held and not second
        assert store.prune(2) == []
    (store.root / "pinned.json").write_text("[")
    assert store.prune(2) == [] and store.list()[0].pinned is False
    store.pin("step-000001")
    assert store.pinned() == set(store.names()), "any of them may have been pinned"


def test_c55_pins_are_bounded_and_what_is_let_go_is_named(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("runtime.shared.checkpoint.MAX_PINNED", 3)
    for step in range(1, 9):
        commit(store, step)
    for step in (1, 2, 3, 1):  # the first once more: it is the last to go now
        assert store.pin(checkpoint_name(step)).let_go == []
    assert store.pin("step-000004").let_go == ["step-000002"] and "newer ones are: step-000002" in caplog.text
    assert store.prune(2) == ["step-000002", "step-000005", "step-000006"]
    assert store.pinned() == {"step-000001", "step-000003", "step-000004"}


def test_c55_a_best_that_is_surpassed_goes_first_and_the_best_last(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.shared.checkpoint.MAX_PINNED", 3)
    for step in range(1, 11):
        commit(store, step)
    best = {1: "a", 3: "a", 8: "b"}
    let_go = {step: store.pin(checkpoint_name(step), best.get(step)).let_go for step in range(1, 11)}
    gone = {step: [int(name.removeprefix("step-")) for name in names] for step, names in let_go.items()}
    assert gone == {1: [], 2: [], 3: [], 4: [1], 5: [2], 6: [4], 7: [5], 8: [6], 9: [7], 10: [3]}
    store.pin("step-000008", "b")
    assert store.pin("step-000001").let_go == ["step-000009"], "told twice it is not surpassed by itself"


@pytest.mark.parametrize("name", ["step-000009", "../step-000001", ".tmp-step-000001", "", "pinned.json"])
def test_what_is_no_checkpoint_cannot_be_pinned_or_loaded(store: CheckpointStore, name: str) -> None:
    commit(store, 1)
    store.pin("step-000001")
    for use in (store.pin, store.load):
        with pytest.raises(CheckpointError):
            use(name)
    assert store.pinned() == {"step-000001"}


def line(step: int) -> dict:
    return {"step": step, "metrics": {"reward": step / 10}, "counts": {"dropped": {"truncated": 1}}}


def test_c43_a_resumed_run_repeats_and_loses_no_line_of_metrics(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.reconcile(None)
    for step in (1, 2, 3):
        log.append(line(step))
    whole = log.path.read_bytes()
    for size in range(len(whole) + 1):
        log.path.write_bytes(whole[:size])  # killed at any byte
        torn = MetricsLog(log.path)
        assert torn.read() == [line(step) for step in range(1, 4)][: len(torn.read())]
    for committed in (2, 3):
        last_start = whole.rindex(b"\n", 0, -1) + 1
        for size in (last_start, last_start + 20, len(whole) - 1, len(whole)):
            log.path.write_bytes(whole[:size])
            log.reconcile(line(committed))
            log.append(line(committed + 1))
            assert [entry["step"] for entry in log.read()] == list(range(1, committed + 2))


def test_a_batch_is_read_as_it_was_written(tmp_path: Path) -> None:
    batch = make_batch(random_samples(1, turns=2), step=7)
    folder = step_folder(tmp_path / "steps", 7)
    write_batch(folder, batch)
    again = read_batch(folder)
    assert folder.name == "000007" and again.step == 7 and again.kind == "train"
    assert again.meta == batch.meta
    for name, value in batch.arrays().items():
        assert np.array_equal(again.arrays()[name], value) and again.arrays()[name].dtype == value.dtype
    assert [path.name for path in folder.parent.iterdir()] == ["000007"]


def with_array(name: str, edit: Callable[[np.ndarray], np.ndarray]) -> Callable[[Batch], Batch]:
    return lambda batch: replace(batch, **{name: edit(getattr(batch, name).copy())})


def put(place: int, value: float) -> Callable[[np.ndarray], np.ndarray]:
    def edit(array: np.ndarray) -> np.ndarray:
        array[place] = value
        return array

    return edit


def with_meta(**changes: object) -> Callable[[Batch], Batch]:
    return lambda batch: replace(batch, meta=batch.meta | changes)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (with_array("tokens", lambda a: a[:-1]), "sampled is"),
        (with_array("tokens", lambda a: a.astype(np.int64)), "int64"),
        (with_array("tokens", put(4, -1)), "negative"),
        (with_array("offsets", put(0, 1)), "offsets"),
        (with_array("offsets", put(2, 1)), "offsets"),
        (with_array("offsets", put(-1, 99999)), "offsets"),
        (with_array("member", put(0, 99)), "member"),
        (with_array("member", put(0, -1)), "member"),
        (with_array("group", put(0, 99)), "group"),
        (with_array("sampled", put(0, 1)), "needs a prompt"),
        (with_array("temperature", put(1, 0.0)), "temperature"),
        (with_array("temperature", put(1, np.nan)), "temperature"),
        (with_meta(schema=2), "schema"),
        (with_meta(kind="other"), "kind"),
        (with_meta(step="1"), "step"),
        (with_meta(groups=None), "group"),
        (with_meta(kind="restore"), "names no checkpoint"),
    ],
)
def test_a_batch_that_cannot_be_trained_on_is_refused_by_writer_and_reader(
    spoil: Callable[[Batch], Batch], says: str, tmp_path: Path
) -> None:
    batch = spoil(make_batch(random_samples(2)))
    with pytest.raises(BatchError, match=says):
        write_batch(tmp_path / "000001", batch)
    assert not list(tmp_path.iterdir())
    (tmp_path / "000001").mkdir()
    save_file(batch.arrays(), tmp_path / "000001" / "batch.safetensors")
    (tmp_path / "000001" / "batch.json").write_text(json.dumps(batch.meta))
    with pytest.raises(BatchError, match=says):
        read_batch(tmp_path / "000001")


def test_a_torn_batch_is_refused(tmp_path: Path) -> None:
    write_batch(tmp_path / "000001", make_batch(random_samples(3)))
    tensors = tmp_path / "000001" / "batch.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-9])
    for _ in range(2):
        with pytest.raises(BatchError, match="000001"):
            read_batch(tmp_path / "000001")
        (tmp_path / "000001" / "batch.json").write_text("[]")


def test_a_restore_step_has_no_samples(tmp_path: Path) -> None:
    write_batch(
        tmp_path / "000002", empty_batch({"schema": 1, "kind": "restore", "step": 2, "from": "step-000001"})
    )
    again = read_batch(tmp_path / "000002")
    assert (again.kind, again.sequences, again.meta["from"]) == ("restore", 0, "step-000001")
