"""launcher/results/trackio_*.py: a run in Trackio's own files, read as Trackio's dashboard reads them."""

from __future__ import annotations

import importlib.metadata
import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from launcher.base.errors import PreflightError
from launcher.base.home import Home
from launcher.records.records import RecordStore, RunRecord
from launcher.results import trackio_process
from launcher.results.trackio_process import TrackioProcess
from runtime.shared import tracker_rows
from tests.support.environment import PROGRAMS
from tests.support.trackio_files import runs_in
from tests.support.waiting import wait_until

BEGUN = 1_795_935_697.5
SECRET = "hf_canary_of_the_hub_0123456789"


def step(number: int, loss: float = 0.5) -> dict[str, Any]:
    return {
        "step": number,
        "version": number,
        "time": BEGUN + 10 * number + loss,
        "settings": {"kl_beta": 0.0},
        "metrics": {"loss": loss, "reward": 0.25, "clip_fraction": 0.125, "kl_reference": 0.0},
        "counts": {"groups": 4, "groups_without_variance": 1, "trained": 8, "dropped": {"late": 1}},
    }


def validation(version: int, score: float) -> dict[str, Any]:
    known = {"compile": "c", "step": version, "name": "score", "score": score, "version": version}
    return {**known, "standard_error": 0.125, "predictors": {"draft": 0.75}, "time": BEGUN + 10 * version + 5}


def write(record: RunRecord, name: str, *lines: dict[str, Any]) -> None:
    (record.folder / "results").mkdir(exist_ok=True)
    (record.folder / "results" / name).write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunRecord:
    """A run that is to be in Trackio. Nothing that is started from here has a network."""
    paths = [str(PROGRAMS / "unit" / "no_network"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.delenv("TRACKIO_DIR", raising=False)
    store = RecordStore(Home(tmp_path, tmp_path, tmp_path))
    runtime = {"wandb_project": "slipway", "train.learning_rate": 1e-3}
    return store.create(name="demo", details={"settings": {"trackio": True}, "runtime": runtime})


def test_a_step_and_a_validation_have_the_fields_names_beside_ours() -> None:
    row = tracker_rows.step_row(step(7))
    assert row["train/reward"] == 0.25 and row["counts/trained"] == 8 and row["policy_version"] == 7
    assert row["train/clip_ratio/region_mean"] == row["train/clip_fraction"] == 0.125
    assert row["train/frac_reward_zero_std"] == 0.25
    assert "train/kl" not in row, "without kl_beta it is not measured"
    assert tracker_rows.step_row({**step(7), "settings": {"kl_beta": 0.1}})["train/kl"] == 0.0
    scored = tracker_rows.validation_row(validation(7, 0.5))
    assert scored["val/reward"] == scored["val/score"] == 0.5 and scored["val/step"] == 7
    assert "val/reward" not in tracker_rows.validation_row(validation(7, 0.5) | {"name": "other"})


@pytest.mark.process
def test_trackio_has_each_step_and_validation_once_over_several_lives(
    record: RunRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What would send it elsewhere, were it not for us; and a secret that is nobody's business there.
    monkeypatch.setenv("TRACKIO_SPACE_ID", "somebody/space")
    monkeypatch.setenv("TRACKIO_DATASET_ID", "somebody/data")
    monkeypatch.setenv("TRACKIO_BUCKET_ID", "somebody/bucket")
    monkeypatch.setenv("HF_TOKEN", SECRET)
    others = {*psutil.Process().children()}
    follower = TrackioProcess(record)
    (child,) = {*psutil.Process().children()} - others
    environ = child.environ()
    assert SECRET not in environ.values() and not {"TRACKIO_SPACE_ID", "TRACKIO_BUCKET_ID"} & environ.keys()
    write(record, "metrics.jsonl", step(1), step(2))
    write(record, "validations.jsonl", validation(0, 0.25), validation(2, 0.125), validation(2, 0.5))
    (record.folder / "results" / "metrics.jsonl").open("a").write('{"step": 3, "torn')
    follower.finish()
    assert (record.folder / trackio_process.LOG).read_text() == "", "no network, and nothing to report"
    (database,) = (record.folder / "results" / "trackio").glob("*.db*")
    assert database.name == "slipway.db", "whole in one file, for whoever copies it"

    # Its machine was lost after step 2, which is taken again.
    write(record, "metrics.jsonl", step(1), step(2, loss=0.75), step(3))
    said: list[str] = []
    trackio_process.write(record, said.append)
    assert said == []
    runs = runs_in(record.folder / "results" / "trackio")
    assert runs.keys() == {record.id}
    found = runs[record.id]
    assert found["name"] == "demo" and found["config"]["train.learning_rate"] == 1e-3
    trained = [(it["step"], it["train/loss"]) for it in found["rows"] if "train/loss" in it]
    assert trained == [(1, 0.5), (2, 0.75), (3, 0.5)]
    scored = [(it["step"], it["val/score"], it["val/reward"]) for it in found["rows"] if "val/score" in it]
    assert scored == [(0, 0.25, 0.25), (2, 0.5, 0.5)]
    assert found["rows"][0]["timestamp"].startswith("2026-11-29T"), "when it was, not when it was written"


@pytest.mark.process
def test_a_launch_that_is_killed_leaves_its_steps_in_trackio_and_no_process(record: RunRecord) -> None:
    write(record, "metrics.jsonl", step(1))
    program = PROGRAMS / "unit" / "die_beside_trackio.py"
    done = subprocess.run([sys.executable, program, record.folder], stdout=subprocess.PIPE, text=True)
    assert done.returncode == -9
    child = int(done.stdout)
    wait_until(lambda: not psutil.pid_exists(child), what="it ends with launch")
    with sqlite3.connect(record.folder / "results" / "trackio" / "slipway.db") as database:
        rows = database.execute("SELECT run_id, step FROM metrics").fetchall()
    assert rows == [(record.id, 1)]


@pytest.mark.process
def test_what_keeps_it_out_of_trackio_is_told_in_a_line(record: RunRecord) -> None:
    write(record, "metrics.jsonl", step(1))
    (record.folder / "results" / "trackio").write_text("no folder")
    said: list[str] = []
    trackio_process.write(record, said.append)
    (line,) = said
    assert line.startswith("Trackio may lack steps: FileExistsError") and "trackio" in line


def test_a_run_that_was_not_to_be_in_trackio_is_not_written(tmp_path: Path) -> None:
    record = RecordStore(Home(tmp_path, tmp_path, tmp_path)).create(details={"settings": {}})
    trackio_process.write(record, lambda line: pytest.fail(line))
    assert not (record.folder / trackio_process.LOG).exists()


def test_the_folder_is_the_users_of_the_time_when_the_run_began(tmp_path: Path) -> None:
    store = RecordStore(Home(tmp_path, tmp_path, tmp_path))
    record = store.create(details=trackio_process.details_of({}))
    folder = record.folder / "results" / "trackio"
    shown = trackio_process.view_command(record, "slipway")
    assert shown == f"TRACKIO_DIR={folder} trackio show --project slipway"
    record = store.create(details=trackio_process.details_of({"TRACKIO_DIR": "a b"}))
    assert trackio_process.view_command(record, "x").startswith(f"TRACKIO_DIR='{Path.cwd()}/a b' ")


@pytest.mark.process
def test_only_rows_of_its_own_are_ever_deleted(record: RunRecord) -> None:
    """The user's folder has a run of the same name, from a Trackio that knew no ids."""
    folder = trackio_process.folder_of(record)
    folder.mkdir(parents=True)
    with sqlite3.connect(folder / "slipway.db") as database:
        database.executescript(_OLD_TABLES)
        database.execute(
            "INSERT INTO metrics(timestamp, run_name, step, metrics) VALUES ('x', 'demo', 5, '{}')"
        )
    write(record, "metrics.jsonl", step(1), step(2))
    trackio_process.write(record, pytest.fail)
    write(record, "metrics.jsonl", step(1), step(2, loss=0.75))
    trackio_process.write(record, pytest.fail)
    (record.folder / "results" / "metrics.jsonl").unlink()
    trackio_process.write(record, pytest.fail)
    with sqlite3.connect(folder / "slipway.db") as database:
        rows = database.execute("SELECT run_name, step FROM metrics ORDER BY step").fetchall()
    assert rows == [("demo", 1), ("demo", 2), ("demo", 5)]


_OLD_TABLES = """
CREATE TABLE metrics (id INTEGER PRIMARY KEY AUTOINCREMENT, timestamp TEXT NOT NULL, run_name TEXT NOT NULL,
    step INTEGER NOT NULL, metrics TEXT NOT NULL);
CREATE TABLE configs (id INTEGER PRIMARY KEY AUTOINCREMENT, run_name TEXT NOT NULL, config TEXT NOT NULL,
    created_at TEXT NOT NULL, UNIQUE(run_name));
CREATE TABLE system_metrics (id INTEGER PRIMARY KEY AUTOINCREMENT, timestamp TEXT NOT NULL,
    run_name TEXT NOT NULL, metrics TEXT NOT NULL);
"""


@pytest.mark.process
def test_a_damaged_line_costs_only_itself(record: RunRecord) -> None:
    damaged: list[dict[str, Any]] = [
        {**step(1), "step": float("inf")},
        {**step(1), "step": 2**70},
        {**step(1), "time": 1e20},
        {**step(1), "time": float("nan")},
        {**step(1), "metrics": {"loss": 2**70}},
        {**step(1), "metrics": {"reward/\ud800": 1.0}},
        {**step(1), "settings": None},
        {**step(1), "counts": {"groups": "x"}},
    ]
    write(record, "metrics.jsonl", *damaged, step(2))
    trackio_process.write(record, pytest.fail)
    assert [it["step"] for it in runs_in(trackio_process.folder_of(record))[record.id]["rows"]] == [2]


def test_the_extra_brings_the_version_that_is_asked_for() -> None:
    wanted = [it for it in importlib.metadata.requires("slipway-rl") or [] if it.startswith("trackio")]
    major, minor = trackio_process._VERSION.split(".")
    assert [it.partition(";")[0].strip() for it in wanted] == [
        f"trackio<{major}.{int(minor) + 1},>={trackio_process._VERSION}"
    ]


@pytest.mark.process
def test_a_name_that_trackio_refuses_is_told_before_the_run() -> None:
    trackio_process.check("slipway")
    for name in ("my_traces", "registry-x", "a" * 300):
        with pytest.raises(PreflightError, match="does not take the project's name"):
            trackio_process.check(name)
