"""What the page shows of a run is what its files at home say, whatever a machine has put into them."""

from __future__ import annotations

import hashlib
import json
import math
import re
from pathlib import Path

import pytest

from launcher.base.home import Home
from launcher.dashboard import page_files, page_rollouts
from launcher.dashboard.run_page_data import RunPageData
from launcher.records.records import RecordStore
from tests.support.played_run import MARKUP, PREDICTORS, played_run

STATIC = Path(page_files.__file__).parent / "static"


@pytest.fixture
def store(tmp_path: Path) -> RecordStore:
    return RecordStore(Home.find({"LAUNCH_HOME": str(tmp_path)}))


def results(store: RecordStore, run_id: str) -> Path:
    return store.folder(run_id) / "results"


def test_a_row_a_step_with_rewards_by_predictor_counts_and_how_long_it_took(store: RecordStore) -> None:
    record = played_run(store, "dev", steps=5)
    found = RunPageData(store, record.id).steps()
    rows = found["steps"]
    lines = [json.loads(it) for it in (results(store, record.id) / "metrics.jsonl").read_text().splitlines()]
    assert [it["step"] for it in rows] == [1, 2, 3, 4, 5]
    for row, line in zip(rows, lines, strict=True):
        assert row["reward"] == line["metrics"]["reward"]
        assert row["predictors"] == {name: line["metrics"][f"reward/{name}"] for name in PREDICTORS}
        assert row["dropped"] == line["counts"]["dropped"]
        assert (row["joined"], row["sealed"]) == (32, int(row["step"] % 4 == 0))
    assert (rows[0]["seconds"], rows[0]["tokens_per_second"]) == (None, None)
    assert rows[1]["seconds"] == pytest.approx(45)
    assert rows[1]["tokens_per_second"] == pytest.approx(900 * 64 / 45)
    assert [it["version"] for it in found["validations"]] == [1]
    assert found["proofs"][4]["max_error"] == 4.05e-06 and found["proofs"][4]["modules"] == 252


def test_how_old_a_steps_samples_were_is_told_by_their_versions(store: RecordStore) -> None:
    record = played_run(store, "dev", steps=3)
    rows = RunPageData(store, record.id).steps()["steps"]
    assert (rows[0]["lag_mean"], rows[0]["lag_most"]) == (0, 0)  # nothing is older than the base
    assert (rows[2]["lag_mean"], rows[2]["lag_most"]) == (0.25, 1)


def test_what_the_clip_stopped_is_told_by_age(store: RecordStore) -> None:
    record = played_run(store, "dev", steps=2)
    path = results(store, record.id) / "metrics.jsonl"
    first, second = map(json.loads, path.read_text().splitlines())
    told = {"trained_tokens": 40.0, "clip_fraction": 0.1, "masked_tokens": 2.0}
    second["metrics"] |= {f"lag1/{name}": value for name, value in told.items()}
    path.write_text(f"{json.dumps(first)}\n{json.dumps(second)}\n")
    found = json.loads(json.dumps(RunPageData(store, record.id).steps()["steps"]))
    assert [it["stopped"] for it in found] == [{}, {"1": pytest.approx(0.15)}]


def test_the_summary_has_money_lease_and_what_the_runtime_says(store: RecordStore) -> None:
    record = played_run(store, "dev", steps=2, ended=False)
    runtime = {"lease_left_seconds": 700.0, "phase": "ready", "version": 2, "step": 2, "children": []}
    summary = RunPageData(store, record.id).summary(runtime, {"requests": 12})
    assert summary["run"]["live"] and summary["run"]["label"] == "dev"
    assert summary["money"]["per_hour"] == 27.52 and summary["money"]["budget"] == 40.0
    assert summary["lease"]["left_seconds"] == 700.0
    assert summary["lease"]["deadline_left_seconds"] == pytest.approx(14400, abs=60)
    assert summary["runtime"]["phase"] == "ready" and summary["door"] == {"requests": 12}


def test_a_secret_in_a_command_line_or_a_proofs_reason_is_hidden(store: RecordStore) -> None:
    record = played_run(store, "dev", steps=1)
    secret = "hf_" + "AbCdEfGhIj" * 4
    store.update(record.id, command=("python", "my.py", "--key", secret))
    with (results(store, record.id) / "publications.jsonl").open("a") as file:
        file.write(json.dumps({"version": 2, "outcome": "failed", "reason": f"no {secret}"}) + "\n")
    page = RunPageData(store, record.id)
    assert secret not in json.dumps(page.summary()) + json.dumps(page.steps())


def test_a_step_is_read_alone_and_a_new_one_is_another_revision(store: RecordStore) -> None:
    record = played_run(store, "dev", steps=2)
    page = RunPageData(store, record.id)
    before = page.summary()["revision"]
    assert before == page.steps()["revision"] == page.summary()["revision"]
    said = page.step_rollouts(2)["lines"]
    assert len(said) == 64 and {it["predictor"] for it in said} == set(PREDICTORS)
    assert any(MARKUP in it["completion"] for it in said)
    assert page.step_rollouts(7)["lines"] == []
    (results(store, record.id) / "rollouts" / "step-000003.jsonl").write_text("{}\n")
    assert page.summary()["revision"] != before


def test_many_files_of_texts_are_looked_through_a_few_at_a_time_the_newest_first(store: RecordStore) -> None:
    record = played_run(store, "dev", steps=page_rollouts.AT_ONCE + 5, rollouts=8)
    page = RunPageData(store, record.id)
    first = page.steps()
    assert first["more"] and [it["said"] for it in first["steps"]] == [0] * 5 + [8] * page_rollouts.AT_ONCE
    second = page.steps()
    assert not second["more"] and {it["said"] for it in second["steps"]} == {8}


def test_what_a_machine_wrote_badly_is_left_out_and_nothing_else(store: RecordStore) -> None:
    record = played_run(store, "dev", steps=2)
    folder = results(store, record.id)
    bad = [
        '{"step": "x"}',
        "[1]",
        '{"step": 9, "metrics": 3}',
        "{",
        "\udcff".encode(errors="replace").decode(),
    ]
    bad.append(json.dumps({"step": 3, "time": math.inf, "metrics": {"reward": 0.5, "entropy": math.nan}}))
    bad.append(
        json.dumps(
            {
                "step": 4,
                "metrics": {"reward": 1.0, "reward/\ud800": 1.0},
                "counts": {"dropped": [1], "samples": "no"},
            }
        )
    )
    bad.append(json.dumps({"step": 5, "metrics": {"reward": 10**400, "loss": 10**400}}))
    bad.append("[" * 100_000)
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(f"{it}\n" for it in bad)
    with (folder / "publications.jsonl").open("a") as file:
        file.write('{"version": "v9", "outcome": ["x"], "adapter": 3}\n')
    odd = {"reward": "much", "completion": 7, "version": True, "prompt": "\ud800", "prompt_cut": "yes"}
    (folder / "rollouts" / "step-000003.jsonl").write_text(f"{json.dumps(odd)}\n[]\nno\n")
    page = RunPageData(store, record.id)
    found = page.steps()
    page_files.as_json([found, page.step_rollouts(3), page.summary()])
    assert [it["step"] for it in found["steps"]] == [1, 2, 3, 4]
    assert found["steps"][2]["time"] is None and found["steps"][2]["entropy"] is None
    assert found["steps"][3]["dropped"] == {} and found["steps"][3]["samples"] is None
    (line,) = page.step_rollouts(3)["lines"]
    assert (line["reward"], line["completion"], line["version"], line["prompt_cut"]) == (
        None,
        "7",
        None,
        False,
    )


def test_the_page_is_made_of_its_own_files_alone() -> None:
    index = (STATIC / page_files.INDEX).read_text()
    named = re.findall(r'(?:src|href)="([^"]+)"', index)
    assert {*named, page_files.INDEX} - {"data:,"} == set(page_files.NAMES)
    assert not re.findall(r"<script(?![^>]*\bsrc=)|\son\w+=|style=", index)
    for name in page_files.NAMES:
        text = (STATIC / name).read_text()
        assert not re.findall(r"(?:https?:|[\"'(=])//\w", text.removeprefix("/*! https://")), name
        if not name.startswith("uPlot"):
            assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text), name


def test_what_others_made_is_as_they_published_it() -> None:
    said = (STATIC / "ORIGIN").read_text()
    for name in ("uPlot.iife.min.js", "uPlot.min.css", "uPlot.LICENSE"):
        digest = hashlib.sha256((STATIC / name).read_bytes()).hexdigest()
        assert f"{digest}  {name}" in said
    assert "MIT" in (STATIC / page_files.LICENCE).read_text()
