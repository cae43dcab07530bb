"""launcher/sync.py: what comes home is whole, or what was there stays."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest

from launcher.errors import NotPulled
from launcher.sync import pull


def _commit(state_dir: Path, step: int, weights: bytes = b"") -> Path:
    """A checkpoint as the trainer leaves it."""
    folder = state_dir / "checkpoints" / f"step-{step:06d}"
    (folder / "adapter").mkdir(parents=True)
    (folder / "adapter" / "adapter_model.safetensors").write_bytes(weights or os.urandom(3000))
    (folder / "adapter" / "adapter_config.json").write_text('{"r": 16}')
    (folder / "optimizer.safetensors").write_bytes(os.urandom(5000))
    (folder / "state.json").write_text(json.dumps({"step": step, "client_state": {"best": step}}))
    files = {
        str(path.relative_to(folder)): {
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "bytes": path.stat().st_size,
        }
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    (folder / "manifest.json").write_text(
        json.dumps({"schema": 1, "step": step, "version": step, "files": files})
    )
    return folder


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "machine"
    (folder / "logs").mkdir(parents=True)
    (folder / "logs" / "trainer.log").write_text("step 1\nstep 2\n")
    (folder / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st')
    return folder


def test_the_newest_checkpoints_adapter_comes_home(state_dir: Path, tmp_path: Path) -> None:
    _commit(state_dir, 1)
    _commit(state_dir, 2, b"the newest")
    report = pull(state_dir, tmp_path / "results")

    adapter = tmp_path / "results" / "adapter"
    assert (adapter / "adapter_model.safetensors").read_bytes() == b"the newest"
    assert sorted(path.name for path in adapter.iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors", "state.json",
    ]  # fmt: skip
    assert (report.step, report.files, report.skipped) == (2, 5, ())
    assert report.bytes == sum(p.stat().st_size for p in (tmp_path / "results").rglob("*") if p.is_file())


def test_the_newest_pinned_one_is_the_best(state_dir: Path, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        _commit(state_dir, step)
    (state_dir / "checkpoints" / "pinned.json").write_text('["step-000001", "step-000002"]')
    pull(state_dir, tmp_path / "results")

    assert json.loads((tmp_path / "results" / "best" / "state.json").read_text())["step"] == 2


@pytest.mark.parametrize("damage", ["flip", "cut", "missing", "manifest", "no manifest"])
def test_g20_a_checkpoint_that_is_not_whole_is_passed_over_and_said(
    state_dir: Path, tmp_path: Path, damage: str
) -> None:
    _commit(state_dir, 1)
    broken = _commit(state_dir, 2)
    weights = broken / "adapter" / "adapter_model.safetensors"
    content = weights.read_bytes()
    if damage == "flip":
        weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "cut":
        weights.write_bytes(content[:-1])
    elif damage == "missing":
        weights.unlink()
    elif damage == "manifest":
        (broken / "manifest.json").write_text("{")
    else:
        (broken / "manifest.json").unlink()
    report = pull(state_dir, tmp_path / "results")

    assert report.step == 1 and len(report.skipped) == 1 and report.skipped[0].startswith("step-000002: ")
    assert json.loads((tmp_path / "results" / "adapter" / "state.json").read_text())["step"] == 1


def test_when_none_is_whole_it_is_an_error_and_what_was_home_stays(state_dir: Path, tmp_path: Path) -> None:
    folder = _commit(state_dir, 1, b"good")
    pull(state_dir, tmp_path / "results")
    (folder / "adapter" / "adapter_model.safetensors").write_bytes(b"bad!")

    with pytest.raises(NotPulled, match="no checkpoint") as refused:
        pull(state_dir, tmp_path / "results")
    assert refused.value.exit_code == 8 and "adapter_model" in str(refused.value.why)
    assert (tmp_path / "results" / "adapter" / "adapter_model.safetensors").read_bytes() == b"good"


def test_a_run_without_a_step_brings_home_what_it_has(state_dir: Path, tmp_path: Path) -> None:
    report = pull(state_dir, tmp_path / "results")

    assert report.step is None and report.files == 2
    assert (tmp_path / "results" / "logs" / "trainer.log").read_text() == "step 1\nstep 2\n"


def test_of_a_file_that_grows_only_whole_lines_come_home(state_dir: Path, tmp_path: Path) -> None:
    pull(state_dir, tmp_path / "results")
    assert (tmp_path / "results" / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'


def test_pulling_again_replaces_and_leaves_no_debris(state_dir: Path, tmp_path: Path) -> None:
    results = tmp_path / "results"
    for step in (1, 2):
        _commit(state_dir, step)
        (results / ".incoming-of-a-killed-pull").mkdir(parents=True)
        (results / "program.txt").write_text("the program's own")
        assert pull(state_dir, results).step == step
    assert sorted(path.name for path in results.iterdir()) == [
        "adapter",
        "logs",
        "metrics.jsonl",
        "program.txt",
    ]


def test_a_disk_that_refuses_is_an_error_with_a_hint(state_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "results").write_text("a file where the folder should be")
    with pytest.raises(NotPulled) as refused:
        pull(state_dir, tmp_path / "results")
    assert refused.value.why and refused.value.hint


def test_a_checkpoint_that_is_removed_meanwhile_is_passed_over(state_dir: Path, tmp_path: Path) -> None:
    _commit(state_dir, 1)
    shutil.rmtree(_commit(state_dir, 2) / "adapter")
    assert pull(state_dir, tmp_path / "results").step == 1
