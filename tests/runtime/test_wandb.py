"""Weights & Biases for real, offline: each committed step once, whatever was killed and resumed."""

from __future__ import annotations

import json
import multiprocessing
import time
from pathlib import Path
from typing import Any

import pytest

from runtime.shared import json_files, validations
from runtime.shared.metrics import MetricsLog
from runtime.shared.wandb_log import WandbLog
from runtime.shared.wandb_signals import CLOSE, OPEN
from tests.support.waiting import wait_until
from tests.support.wandb_files import axes_of, history, story_of

pytestmark = pytest.mark.slow


def line(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "version": step,
        "settings": {"kl_beta": 0.1},
        "metrics": {
            "loss": step / 10,
            "reward": 0.5,
            "reward/draft": 0.25,
            "learning_rate": 1e-3,
            "kl_reference": 0.5,
        },
        "counts": {"trained": 8, "dropped": {"truncated": 1}},
    }


def validation(step: int, **others: Any) -> dict[str, Any]:
    known = {"compile": "c1", "step": step, "name": "score", "score": step / 8, "version": step}
    return {**known, "standard_error": 0.125, "predictors": {"draft": 0.75}, **others}


def life(
    folder: Path, committed: int, does: list[int | dict[str, Any]], mode: str = "offline", texts: int = 0
) -> None:
    """One life of the trainer's logging, as a process: it resumes from `committed`, then does what is said.

    A number is a step that is logged, a dict a validation that the gateway has written down meanwhile.
    """
    # wandb names its folders by the second
    names = "logs/wandb/offline-run-{}-*"
    wait_until(lambda: not list(folder.glob(names.format(time.strftime("%Y%m%d_%H%M%S")))))
    child = multiprocessing.get_context("spawn").Process(
        target=_log, args=(folder, committed, does, mode, texts)
    )
    child.start()
    child.join(120)
    assert child.exitcode == 0


def _log(folder: Path, committed: int, does: list[int | dict[str, Any]], mode: str, texts: int) -> None:
    metrics = MetricsLog(folder / "metrics.jsonl")
    wandb = WandbLog(
        mode,
        "slipway-test",
        "run-1",
        folder,
        {"learning_rate": 1e-3},
        committed=committed,
        num_completions=texts,
    )
    if metrics.reconcile(line(committed) if committed else None):
        wandb.append(line(committed), maybe_logged=True)
    for it in does:
        if isinstance(it, dict):
            json_files.append_line(folder / validations.FILE, it)
            continue
        wandb.append(line(it))
        metrics.append(line(it))
    wandb.close()


def _close_when_told(folder: Path, told: Any, closed: Any) -> None:
    wandb = WandbLog("offline", "slipway-test", "run-1", folder, {}, name="demo")
    wandb.append(line(1))
    json_files.append_line(folder / validations.FILE, validation(1))
    told.wait(60)
    wandb.log_new_validations()
    wandb.append(line(2))
    closed.set()
    told.clear()
    told.wait(60)  # as a trainer that lives on


def test_s01_a_run_is_ended_as_soon_as_somebody_wants_it_ended_whole_and_by_its_name(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    told, closed = context.Event(), context.Event()
    child = context.Process(target=_close_when_told, args=(tmp_path, told, closed))
    child.start()
    try:
        wait_until(lambda: (tmp_path / OPEN).exists(), 120, "the run to begin")
        (tmp_path / CLOSE).touch()
        told.set()
        assert closed.wait(120)
        assert not (tmp_path / OPEN).exists() and child.is_alive()
        (file,) = tmp_path.rglob("*.wandb")
        story = story_of(file)
    finally:
        told.set()
        child.kill()
        child.join()
    assert story == {"name": "demo", "steps": [1], "validations": [1], "ended": True}


def test_s01_a_process_that_is_not_the_trainers_first_leaves_the_firsts_run_open(tmp_path: Path) -> None:
    """It starts as late as it likes, and is closed as the first is."""
    (tmp_path / OPEN).touch()
    (tmp_path / CLOSE).touch()
    other = WandbLog("offline", "slipway-test", "run-1", tmp_path, {}, is_rank_zero=False)
    other.append(line(1))
    other.log_new_validations()
    other.close()
    assert sorted(it.name for it in tmp_path.iterdir()) == [CLOSE, OPEN]


def logged(folder: Path) -> list[dict[str, Any]]:
    return [record for file in sorted(folder.rglob("*.wandb")) for record in history(file)]


def test_c43_wandb_has_each_step_once_over_several_lives(tmp_path: Path) -> None:
    life(tmp_path, 0, [1, 2])
    life(tmp_path, 3, [4])  # step 3 was committed, then the end came before it was logged
    life(tmp_path, 4, [5])
    found = logged(tmp_path)
    assert sorted(record["train/step"] for record in found) == [1, 2, 3, 4, 5]
    for record in found:
        step = record["train/step"]
        assert record["train/loss"] == pytest.approx(step / 10)
        assert record["train/reward/draft"] == 0.25
        assert record["train/learning_rate"] == 1e-3
        assert record["train/kl"] == record["train/kl_reference"] == 0.5, "TRL's name of it"
        assert record["policy_version"] == step and record["counts/trained"] == 8
    assert {file.name for file in tmp_path.rglob("*.wandb")} == {"run-run-1.wandb"}


def test_a19_wandb_has_each_validation_once_over_several_lives_in_their_order(tmp_path: Path) -> None:
    life(tmp_path, 0, [validation(0), 1, 2, validation(2)])
    life(tmp_path, 2, [validation(2, name="other", predictors={}), 3, 4, validation(4), validation(4)])
    life(tmp_path, 4, [5, 6, validation(6)])
    found = logged(tmp_path)
    scored = [(it["val/step"], it["val/score"]) for it in found if "val/score" in it]
    assert scored == [(0, 0.0), (2, 0.25), (4, 0.5), (6, 0.75)]
    assert [it["val/other"] for it in found if "val/other" in it] == [0.25]
    assert {it["val/standard_error"] for it in found if "val/score" in it} == {0.125}
    assert {it["val/score/draft"] for it in found if "val/score" in it} == {0.75}
    assert [it["val/reward"] for it in found if "val/score" in it] == [it[1] for it in scored]
    order = [
        it.get("train/step", f"validation {it['val/step']}" if "val/score" in it else "other") for it in found
    ]
    assert order == [
        "validation 0", 1, 2, "validation 2", "other", 3, 4, "validation 4", 5, 6, "validation 6"
    ]  # fmt: skip
    # wandb takes a row only where its own steps go up: none of ours are among them.
    for file in tmp_path.rglob("*.wandb"):
        own = [it["_step"] for it in history(file)]
        assert own == sorted(set(own))
    axes = {
        it.name or it.glob_name: it.step_metric for file in tmp_path.rglob("*.wandb") for it in axes_of(file)
    }
    assert axes["val/*"] == "val/step" and axes["train/*"] == "train/step"


def test_a19_a_machine_begun_anew_logs_no_validation_of_the_lost_one_again(tmp_path: Path) -> None:
    for it in (validation(0), validation(2)):
        json_files.append_line(tmp_path / validations.FILE, it)
    life(tmp_path, 3, [4, validation(4)])
    assert [it["val/step"] for it in logged(tmp_path) if "val/score" in it] == [4]


def test_s08_what_run_log_validated_is_a_reward_as_well_where_arts_people_look(tmp_path: Path) -> None:
    life(tmp_path, 0, [validation(0, compile="", predictors={}), 1])
    assert [it["val/reward"] for it in logged(tmp_path) if "val/score" in it] == [0.0]


def test_a19_completions_are_a_table_where_that_is_asked_for_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "a-secret-without-any-form")
    said = tmp_path / "logs" / "rollouts"
    said.mkdir(parents=True)
    for index in range(6):
        json_files.append_line(
            said / "step-000001.jsonl",
            {
                "step": 1,
                "group": f"g{index}",
                "predictor": "draft",
                "reward": index / 4,
                "prompt": "x" * 5000 + " key sk-" + "a1" * 20,
                "completion": f"answer {index} a-secret-without-any-form",
            },
        )
    life(tmp_path, 0, [1, 2], texts=4)
    (row,) = [it for it in logged(tmp_path) if "train/completions/path" in it]
    assert row["train/step"] == 1  # nothing was written down of step 2
    (table,) = tmp_path.rglob("*.table.json")
    found = json.loads(table.read_text())
    assert found["columns"] == ["step", "group", "predictor", "reward", "prompt", "completion", "dropped"]
    assert [it[1:4] for it in found["data"]] == [[f"g{i}", "draft", i / 4] for i in range(4)]
    assert found["data"][2][5] == "answer 2 ***"
    assert "a-secret" not in table.read_text() and "a1a1a1" not in table.read_text()
    assert len(found["data"][0][4]) == 2000


def test_a19_no_text_goes_there_unless_it_is_asked_for(tmp_path: Path) -> None:
    said = tmp_path / "logs" / "rollouts"
    said.mkdir(parents=True)
    json_files.append_line(said / "step-000001.jsonl", {"step": 1, "completion": "a text of somebody's"})
    life(tmp_path, 0, [1])
    (row,) = logged(tmp_path)
    assert not [name for name in row if name.startswith("train/completions")]
    written = [path.read_bytes() for path in (tmp_path / "logs" / "wandb").rglob("*") if path.is_file()]
    assert not any(b"a text of somebody" in it for it in written)


def test_a_service_that_refuses_costs_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    life(tmp_path, 0, [1], mode="online")
    assert "kept offline" in capfd.readouterr().err
    (file,) = tmp_path.rglob("offline-run-*/*.wandb")
    assert [record["train/step"] for record in history(file)] == [1]
