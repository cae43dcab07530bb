"""launcher/results/results_copy.py: what comes home is whole, or what was there stays."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from launcher.base.errors import NotPulled
from launcher.results import durable
from launcher.results.results_copy import pull
from tests.support.committed import commit, name_best, pin, write_said


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "machine"
    (folder / "logs").mkdir(parents=True)
    (folder / "logs" / "trainer.log").write_text("step 1\nstep 2\n")
    (folder / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st')
    return folder


def test_the_newest_checkpoints_adapter_comes_home(state_dir: Path, tmp_path: Path) -> None:
    commit(state_dir, 1)
    commit(state_dir, 2, b"the newest")
    report = pull(state_dir, tmp_path / "results")

    adapter = tmp_path / "results" / "adapter"
    assert (adapter / "adapter_model.safetensors").read_bytes() == b"the newest"
    assert sorted(path.name for path in adapter.iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors", "state.json",
    ]  # fmt: skip
    assert (report.step, report.files, report.skipped) == (2, 10, ())
    assert report.bytes == sum(p.stat().st_size for p in (tmp_path / "results").rglob("*") if p.is_file())


def test_c54_the_best_at_home_is_the_one_that_an_optimizer_named_not_the_newest_pinned(
    state_dir: Path, tmp_path: Path
) -> None:
    best = tmp_path / "results" / "best"
    for step in (1, 2, 3):
        commit(state_dir, step)
    pin(state_dir, 1, 2)
    pull(state_dir, tmp_path / "results")
    assert not best.exists(), "what is only pinned is nobody's best"

    name_best(state_dir, 1, "the first compile")
    pull(state_dir, tmp_path / "results")
    assert json.loads((best / "state.json").read_text())["step"] == 1
    assert json.loads((best / "best.json").read_text()) == {
        "checkpoint": "step-000001", "of": "the first compile",
    }  # fmt: skip

    name_best(state_dir, 3, "the second compile")
    pull(state_dir, tmp_path / "results")
    assert json.loads((best / "state.json").read_text())["step"] == 3


@pytest.mark.parametrize("name", ["../../elsewhere", "step-000009", "pinned.json"])
def test_g24_a_best_that_is_no_checkpoint_of_the_run_is_not_looked_for(
    state_dir: Path, tmp_path: Path, name: str
) -> None:
    commit(state_dir, 1)
    (state_dir / "checkpoints" / "best.json").write_text(json.dumps({"checkpoint": name, "of": "it"}))
    assert pull(state_dir, tmp_path / "results").step == 1
    assert not (tmp_path / "results" / "best").exists()


@pytest.mark.parametrize("damage", ["flip", "cut", "missing", "manifest", "a digit of it", "no manifest"])
def test_g20_a_checkpoint_that_is_not_whole_is_passed_over_and_said(
    state_dir: Path, tmp_path: Path, damage: str
) -> None:
    commit(state_dir, 1)
    broken = commit(state_dir, 2)
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
    elif damage == "a digit of it":
        text = (broken / "manifest.json").read_text()
        (broken / "manifest.json").write_text(text.replace('"bytes":5000', '"bytes":5001'))
    else:
        (broken / "manifest.json").unlink()
    report = pull(state_dir, tmp_path / "results")

    assert report.step == 1 and len(report.skipped) == 1 and report.skipped[0].startswith("step-000002: ")
    assert json.loads((tmp_path / "results" / "adapter" / "state.json").read_text())["step"] == 1


def test_when_none_is_whole_it_is_an_error_and_what_was_home_stays(state_dir: Path, tmp_path: Path) -> None:
    folder = commit(state_dir, 1, b"good")
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
        commit(state_dir, step)
        (results / ".incoming-of-a-killed-pull").mkdir(parents=True)
        (results / "program.txt").write_text("the program's own")
        assert pull(state_dir, results).step == step
    assert sorted(path.name for path in results.iterdir()) == [
        "adapter",
        "durable",
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
    commit(state_dir, 1)
    shutil.rmtree(commit(state_dir, 2) / "adapter")
    assert pull(state_dir, tmp_path / "results").step == 1


@pytest.mark.parametrize(
    "name", ["../../outside", "/tmp/outside", "adapter//outside", "adapter/../../outside", "a\\..\\b", "."]
)
def test_g24_a_name_that_leads_out_of_its_folder_is_refused(
    state_dir: Path, tmp_path: Path, name: str
) -> None:
    commit(state_dir, 1)
    evil = commit(state_dir, 2)
    said = json.loads((evil / "manifest.json").read_text())
    said["files"][name] = said["files"].pop("optimizer.safetensors")
    write_said(evil, said)
    report = pull(state_dir, tmp_path / "results")

    assert report.step == 1
    assert "points outside its folder" in report.skipped[0]
    assert not list(tmp_path.rglob("*outside*"))


@pytest.mark.parametrize("where", ["file", "folder", "checkpoint", "log", "metrics", "manifest"])
def test_g24_a_symbolic_link_on_the_machine_is_not_followed(
    state_dir: Path, tmp_path: Path, where: str
) -> None:
    commit(state_dir, 1)
    secret = tmp_path / "secret"
    secret.mkdir()
    evil = commit(state_dir, 2)
    shutil.copytree(evil, secret / "step-000002")
    if where == "file":
        _link(evil / "optimizer.safetensors", secret / "step-000002" / "optimizer.safetensors")
    elif where == "folder":
        shutil.rmtree(evil / "adapter")
        (evil / "adapter").symlink_to(secret / "step-000002" / "adapter")
    elif where == "checkpoint":
        shutil.rmtree(evil)
        evil.symlink_to(secret / "step-000002")
    elif where == "manifest":
        _link(evil / "manifest.json", secret / "step-000002" / "manifest.json")
    elif where == "log":
        _link(state_dir / "logs" / "trainer.log", secret / "step-000002" / "state.json")
    else:
        _link(state_dir / "metrics.jsonl", secret / "step-000002" / "state.json")
    report = pull(state_dir, tmp_path / "results")

    assert any("is a symbolic link" in line for line in report.skipped), report
    assert report.step == (1 if where in ("folder", "checkpoint", "manifest") else 2)
    assert durable.newest_step(tmp_path / "results") == (2 if where in ("log", "metrics") else 1)
    home = [path for path in (tmp_path / "results").rglob("*") if path.is_symlink()]
    assert not home
    assert not (tmp_path / "results" / "logs" / "trainer.log").exists() or where != "log"


def test_g24_a_pipe_in_the_place_of_a_file_holds_nobody(state_dir: Path, tmp_path: Path) -> None:
    commit(state_dir, 1)
    os.mkfifo(state_dir / "logs" / "engine.log")
    report = pull(state_dir, tmp_path / "results")

    assert report.step == 1
    assert report.skipped == ("engine.log: logs/engine.log is not a file",)


def test_g22_results_that_do_not_come_home_stay_where_they_are_and_that_is_said(
    state_dir: Path, tmp_path: Path
) -> None:
    commit(state_dir, 1)
    results = tmp_path / "results"
    results.mkdir()
    (results / "logs").write_text("a file in the way")
    before = sorted(path for path in state_dir.rglob("*"))
    with pytest.raises(NotPulled) as refused:
        pull(state_dir, results)
    assert refused.value.exit_code == 8
    assert str(state_dir) in str(refused.value.why)
    assert sorted(path for path in state_dir.rglob("*")) == before


def _link(path: Path, to: Path) -> None:
    path.unlink()
    path.symlink_to(to)
