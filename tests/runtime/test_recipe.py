"""`tune run` of the recipe on recorded batches: stopped and resumed, on two ranks, on batches to refuse."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors.torch import load_file

from runtime.recipes.command import trainer_command
from runtime.shared import failpoints
from runtime.shared.batch import Batch, empty_batch, step_folder, write_batch
from runtime.shared.checkpoint import ADAPTER_WEIGHTS, Checkpoint, CheckpointStore
from runtime.shared.runtime_config import RuntimeConfig
from runtime.shared.train_config import LoraConfig, TrainConfig
from tests.runtime.trainer_fixtures import VOCABULARY, make_batch, random_samples, tiny_model
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

_SECONDS = 600
REPOSITORY = Path(__file__).resolve().parents[2]


def configured(state: Path, processes: int = 1) -> RuntimeConfig:
    (state / "steps").mkdir(parents=True, exist_ok=True)
    return RuntimeConfig(
        run_id="recipe-test",
        model_path=str(tiny_model()),
        state_dir=str(state),
        socket_dir=str(state),
        train_processes=processes,
        train=TrainConfig(lora=LoraConfig(rank=4, alpha=12), learning_rate=1e-3, pack_tokens=128),
    )


def record(state: Path, batches: list[Batch]) -> None:
    for batch in batches:
        write_batch(step_folder(state / "steps", batch.step), batch)


def recorded(first: int, last: int) -> list[Batch]:
    return [make_batch(random_samples(seed, groups=4), step=seed) for seed in range(first, last + 1)]


@contextmanager
def started(config: RuntimeConfig, *, follow: bool, failpoint: str = "") -> Iterator[subprocess.Popen[bytes]]:
    environ = {
        failpoints.VARIABLE: failpoint,
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    log = Path(config.state_dir) / "trainer.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            trainer_command(config, follow=follow),
            cwd=REPOSITORY, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        )  # fmt: skip
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()


def run(config: RuntimeConfig, failpoint: str = "") -> int:
    with started(config, follow=False, failpoint=failpoint) as process:
        return process.wait(_SECONDS)


def newest(state: Path) -> Checkpoint:
    checkpoint = CheckpointStore(state / "checkpoints").newest()
    assert checkpoint is not None, (state / "trainer.log").read_text()[-3000:]
    return checkpoint


def metric_steps(state: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (state / "metrics.jsonl").read_text().splitlines()]


def await_step(state: Path, step: int, process: subprocess.Popen[bytes]) -> None:
    def said() -> str:
        return (state / "trainer.log").read_text()[-3000:]

    def committed() -> bool:
        found = f"step-{step:06d}" in CheckpointStore(state / "checkpoints").names()
        assert found or process.poll() is None, said()
        return found

    wait_until(committed, _SECONDS, said)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps in one go, by one process."""
    state = tmp_path_factory.mktemp("straight")
    record(state, recorded(1, 4))
    assert run(configured(state)) == 0, (state / "trainer.log").read_text()[-3000:]
    assert newest(state).step == 4 and metric_steps(state) == [1, 2, 3, 4]
    return state


def test_its_log_says_when_it_is_ready_and_what_is_committed(straight: Path) -> None:
    said = [line.split(" ", 2)[-1] for line in (straight / "trainer.log").read_text().splitlines()]
    own = [line for line in said if line.startswith(("ready", "step"))]
    assert own == ["ready after step 0", *(f"step {step} is committed" for step in (1, 2, 3, 4))]


def test_c43_stopped_and_killed_on_the_way_it_commits_the_same_adapter(
    straight: Path, tmp_path: Path
) -> None:
    config = configured(tmp_path)
    record(tmp_path, recorded(1, 2))
    with started(config, follow=True) as process:
        await_step(tmp_path, 2, process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(_SECONDS) == 0
    record(tmp_path, recorded(3, 3))
    with started(config, follow=True) as process:
        await_step(tmp_path, 3, process)
        process.kill()
    (tmp_path / "metrics.jsonl").open("a").write('{"step": 4, "metrics": {}')
    record(tmp_path, recorded(4, 4))
    assert run(config) == 0
    found, expected = newest(tmp_path), newest(straight)
    assert found.step == 4
    assert found.adapter_sha256 == expected.adapter_sha256
    for file in ("optimizer.safetensors", "probe.safetensors"):
        assert found.manifest["files"][file] == expected.manifest["files"][file]
    assert metric_steps(tmp_path) == [1, 2, 3, 4]
    assert found.state["client_state"] == {"at": 4} and found.state["key"] == "key-4"


def test_c15_two_processes_commit_the_adapter_of_one(straight: Path, tmp_path: Path) -> None:
    record(tmp_path, recorded(1, 4))
    assert run(configured(tmp_path, processes=2)) == 0, (tmp_path / "trainer.log").read_text()[-3000:]
    assert metric_steps(tmp_path) == [1, 2, 3, 4]
    found, expected = (load_file(newest(state).folder / ADAPTER_WEIGHTS) for state in (tmp_path, straight))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert float((found[name] - value).abs().max()) <= 1e-5, name


def test_g19_a_step_that_fails_in_another_process_than_the_first_is_not_tried_again(tmp_path: Path) -> None:
    record(tmp_path, recorded(1, 3))
    config = configured(tmp_path, processes=2)
    assert run(config, "rank.training@2:raise") != 0
    failed = json.loads((step_folder(tmp_path / "steps", 2) / "failed.json").read_text())
    assert failed["error"] == "FailpointError: failpoint rank.training"
    assert run(config) == 0, (tmp_path / "trainer.log").read_text()[-3000:]
    assert metric_steps(tmp_path) == [1, 3]


def test_keys_that_make_no_loss_end_the_recipe_before_a_model_is_read(tmp_path: Path) -> None:
    command = trainer_command(configured(tmp_path), follow=False)
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [*command, "loss=gspo", "normaliser=token", "model_path=/nowhere"],
        cwd=REPOSITORY, env=environ, capture_output=True, text=True, timeout=_SECONDS,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "cannot train: normaliser=token does not fit: "
        "gspo clips whole answers, so each must count once: normaliser=sequence"
    )


def test_a_refused_batch_or_restore_fails_its_step_and_the_next_one_is_taken(tmp_path: Path) -> None:
    good, bad = recorded(1, 1)[0], recorded(2, 2)[0]
    bad.tokens[3] = VOCABULARY
    flat = make_batch(random_samples(3, members=1), step=3)
    back, nowhere = (
        empty_batch({"schema": 1, "kind": "restore", "step": step, "from": source, "key": f"key-{step}"})
        for step, source in ((4, "step-000001"), (6, "step-000002"))
    )
    torn, last = recorded(5, 5)[0], make_batch(random_samples(7, members=1), step=7)
    last.meta["empty"] = {"steps": 2, "samples": 9}  # sent before it, and never numbered
    record(tmp_path, [good, bad, flat, back, torn, nowhere, last])
    tensors = step_folder(tmp_path / "steps", 5) / "batch.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-9])
    assert run(configured(tmp_path)) == 0, (tmp_path / "trainer.log").read_text()[-3000:]
    for step, reason in ((2, "vocabulary"), (5, "BatchError"), (6, "step-000002")):
        failed = json.loads((step_folder(tmp_path / "steps", step) / "failed.json").read_text())
        assert reason in failed["error"]
    assert metric_steps(tmp_path) == [1, 3, 4, 7]
    store = CheckpointStore(tmp_path / "checkpoints")
    hashes = {store.load(name).adapter_sha256 for name in store.names()}
    assert len(hashes) == 1, "a step without variance and a restore of step 1 leave the adapter as it was"
    assert store.load("step-000003").state["metrics"]["updated"] == 0
    state = store.load("step-000007").state
    assert (state["counters"]["steps"], state["metrics"]["empty_steps"]) == (4, 2)
    assert (state["counters"]["empty_steps"], state["counters"]["empty_samples"]) == (2, 9)
