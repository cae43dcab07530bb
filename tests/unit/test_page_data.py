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
from launcher.dashboard.pages import Pages
from launcher.dashboard.run_page_data import RunPageData
from launcher.records.records import RecordStore, RunRecord
from tests.support.played_run import MARKUP, PREDICTORS, played_agent, played_run

STATIC = Path(page_files.__file__).parent / "static"


@pytest.fixture
def store(tmp_path: Path) -> RecordStore:
    return RecordStore(Home.find({"LAUNCH_HOME": str(tmp_path)}))


def results(store: RecordStore, run_id: str) -> Path:
    return store.folder(run_id) / "results"


def page_of(store: RecordStore, record: RunRecord) -> RunPageData:
    return RunPageData(store, record.id)


def test_a_figure_of_each_step_by_the_name_that_its_file_has(store: RecordStore) -> None:
    record = played_run(store, "dev", steps=5)
    found = page_of(store, record).steps()
    columns = found["columns"]
    lines = [json.loads(it) for it in (results(store, record.id) / "metrics.jsonl").read_text().splitlines()]
    assert found["steps"] == [1, 2, 3, 4, 5]
    for at, line in enumerate(lines):
        assert {name: columns[name][at] for name in line["metrics"]} == line["metrics"]
        counts = {name: it for name, it in line["counts"].items() if name != "dropped"}
        assert {name: columns[f"counts.{name}"][at] for name in counts} == counts
        assert {reason: it[at] for reason, it in found["dropped"].items() if it[at]} == line["counts"][
            "dropped"
        ]
    assert columns["seconds"] == [None, *([pytest.approx(45)] * 4)]
    assert columns["tokens_per_second"][1] == pytest.approx(900 * 64 / 45)
    assert columns["length"][0] == 900  # nobody has measured it: the tokens of a trained answer
    assert columns["cost"][4] == pytest.approx(27.52 * 225 / 3600, rel=0.01)
    assert [it["version"] for it in found["validations"]] == [1]
    assert found["proofs"][4]["max_error"] == 4.05e-06 and found["proofs"][4]["modules"] == 252


def test_an_optimizers_figures_and_alarms_are_at_the_runs_own_steps(store: RecordStore) -> None:
    """The second compile's third step is the run's fifth."""
    record = played_run(store, "dev", steps=5)
    journal = [
        {
            "kind": "step",
            "compile": "a",
            "step": 1,
            "version": 1,
            "parse_rate": 0.5,
            "outcomes": {"scored": 3},
        },
        {"kind": "step", "compile": "b", "step": 3, "version": 5, "length": 70.5, "cut_off_rate": 0.25},
        {"kind": "alarm", "compile": "b", "name": "length", "step": 3, "text": "longer", "advice": "look"},
    ]
    told = "".join(json.dumps(it) + "\n" for it in journal)
    (results(store, record.id) / "grpo.jsonl").write_text(told)
    alarm = {"name": "entropy", "step": 2, "text": "no variety", "time": 1.0}
    (results(store, record.id) / "alarms.jsonl").write_text(json.dumps(alarm) + "\n")
    found = page_of(store, record).steps()
    assert found["columns"]["parse_rate"] == [0.5, None, None, None, None]
    assert found["columns"]["outcomes.scored"][0] == 3
    assert found["columns"]["length"] == [900, 900, pytest.approx(900 * 64 / 56), 900, 70.5]
    assert found["columns"]["cut_off_rate"] == [None, None, None, None, 0.25]
    assert [it["cut_off"] for it in page_of(store, record).texts()["files"]] == [0.0] * 5
    assert [(it["name"], it["step"], it["advice"]) for it in found["alarms"]] == [
        ("length", 5, "look"), ("entropy", 2, None)
    ]  # fmt: skip


def test_how_old_a_steps_samples_were_is_told_by_their_versions(store: RecordStore) -> None:
    record = played_run(store, "dev", steps=3)
    files = page_of(store, record).texts()["files"]
    assert [it["staleness_mean"] for it in files] == [0, 0.25, 0.25]  # nothing is older than the base
    assert [it["staleness_max"] for it in files] == [0, 1, 1]


def test_what_the_clip_stopped_is_told_by_age(store: RecordStore) -> None:
    record = played_run(store, "dev", steps=2)
    path = results(store, record.id) / "metrics.jsonl"
    first, second = map(json.loads, path.read_text().splitlines())
    told = {"trained_tokens": 40.0, "clip_fraction": 0.1, "masked_tokens": 2.0}
    second["metrics"] |= {f"lag1/{name}": value for name, value in told.items()}
    path.write_text(f"{json.dumps(first)}\n{json.dumps(second)}\n")
    assert page_of(store, record).steps()["columns"]["stopped/1"] == [None, pytest.approx(0.15)]


def test_what_changes_all_the_time_has_money_lease_and_what_the_runtime_says(store: RecordStore) -> None:
    record = played_run(store, "dev", steps=2, ended=False)
    runtime = {"lease_left_seconds": 700.0, "phase": "ready", "version": 2, "step": 2, "children": []}
    head = page_of(store, record).run(runtime, {"requests": 12})
    assert head["run"]["live"] and head["run"]["label"] == "dev"
    assert head["money"]["per_hour"] == 27.52 and head["money"]["budget"] == 40.0
    assert head["lease"]["left_seconds"] == 700.0
    assert head["lease"]["deadline_left_seconds"] == pytest.approx(14400, abs=60)
    assert head["runtime"]["phase"] == "ready" and head["door"] == {"requests": 12}


def test_a_secret_is_hidden_wherever_the_page_has_it(store: RecordStore) -> None:
    record = played_run(store, "dev", steps=1)
    secret = "hf_" + "AbCdEfGhIj" * 4
    details = record.details | {"settings": {"model": secret}}
    store.update(record.id, command=("python", "my.py", "--key", secret), details=details)
    with (results(store, record.id) / "publications.jsonl").open("a") as file:
        file.write(json.dumps({"version": 2, "outcome": "failed", "reason": f"no {secret}"}) + "\n")
    (results(store, record.id) / "alarms.jsonl").write_text(json.dumps({"step": 1, "text": secret}) + "\n")
    (store.folder(record.id) / "program.log").write_text(f"the key is {secret}\n")
    pages = Pages(store, record.id)
    pieces = ("run", "steps", "settings", "log-program")
    shown = json.dumps([pages.runs(), *(pages.get(f"{record.id}/{piece}") for piece in pieces)])
    assert secret not in shown and "the key is ***" in shown


def test_a_step_is_read_alone_and_a_new_one_is_another_revision(store: RecordStore) -> None:
    record = played_run(store, "dev", steps=2)
    page = page_of(store, record)
    before = page.run()
    assert before["revision"] == page.steps()["revision"] and before["texts"] == page.texts()["revision"]
    said = page.step_rollouts("step-2")["lines"]
    assert len(said) == 64 and {it["predictor"] for it in said} == set(PREDICTORS)
    assert any(MARKUP in it["completion"] for it in said)
    assert page.step_rollouts("step-7")["lines"] == []
    (results(store, record.id) / "rollouts" / "step-000003.jsonl").write_text("{}\n")
    after = page.run()
    assert after["texts"] != before["texts"] and after["revision"] == before["revision"]


def test_an_empty_step_has_its_texts_after_the_step_that_it_followed(store: RecordStore) -> None:
    record = played_run(store, "dev", steps=2)
    folder = results(store, record.id) / "rollouts"
    (folder / "empty-000001-01.jsonl").write_text(json.dumps({"rollout": "r", "dropped": "no reward"}) + "\n")
    for odd in ("empty-000001.jsonl", "step-000001-01.jsonl", "step-1.jsonl", "other.jsonl"):
        (folder / odd).write_text("{}\n")
    page = page_of(store, record)
    (folder / "validation-000001-score.jsonl").write_text(json.dumps({"rollout": "v", "version": 1}) + "\n")
    assert [(it["name"], it["kind"], it["step"]) for it in page.texts()["files"]] == [
        ("step-1", "step", 1), ("validation-1-score", "validation", 1), ("empty-1-1", "empty", 1),
        ("step-2", "step", 2),
    ]  # fmt: skip
    assert page.step_rollouts("validation-1-score")["lines"][0]["rollout"] == "v"
    assert page.step_rollouts("empty-1-1")["lines"][0]["dropped"] == "no reward"


def test_a_search_finds_each_case_of_a_word_and_a_group_over_the_steps(store: RecordStore) -> None:
    record = played_run(store, "dev", steps=3)
    texts = page_of(store, record).rollouts
    hits = [*texts.search("MOVED TO friday")]
    assert {it["file"] for it in hits} == {"step-1", "step-2", "step-3"} and hits[0]["file"] == "step-3"
    assert {it["found"] for it in hits} == {"moved to Friday"} and hits[0]["where"] == "completion"
    assert [*texts.search('name": "search_inbox')]  # as it is read, not as JSON writes it
    assert not [*texts.search("nobody says this")]
    assert len([*texts.search("the", most=5)]) == 5


def test_an_example_is_followed_over_the_steps_by_its_prompt(store: RecordStore) -> None:
    record = played_agent(store, "dev", steps=3, rollouts=16, turns=3)
    texts = page_of(store, record).rollouts
    found = [*texts.like("step-2", "question-0", "4")]
    assert [(it["file"], it["rollout"]) for it in found] == [(f"step-{it}", f"r-{it}-4") for it in (3, 2, 1)]
    assert all("euros" in it["after"] for it in found)  # the end of each conversation
    assert not [*texts.like("step-9", "question-0", "4")] and not [*texts.like("step-2", "question-0", "9")]
    assert len([*texts.like("step-2", "question-0", "4", most=2)]) == 2


def test_what_has_no_rollouts_name_and_what_is_rewarded_call_by_call_are_rollouts_of_their_own(
    store: RecordStore,
) -> None:
    """Members that were named by their samples; and one rollout whose calls have rewards of their own."""
    record = played_run(store, "dev", steps=1)
    path = results(store, record.id) / "rollouts" / "step-000001.jsonl"
    named = [
        {"group": "g", "member": at, "rollout": None, "reward": at, "completion": "a"} for at in range(3)
    ]
    old = [{"group": "h", "rollout": "r", "reward": reward, "completion": "a"} for reward in (0, 1)]
    path.write_text("".join(json.dumps(it) + "\n" for it in [*named, *old]))
    (found,) = page_of(store, record).texts()["files"]
    assert found["rollouts"] == 5


def test_many_files_of_texts_are_looked_through_a_few_at_a_time_the_newest_first(store: RecordStore) -> None:
    record = played_run(store, "dev", steps=page_rollouts.AT_ONCE + 5, rollouts=8)
    page = page_of(store, record)
    first = page.texts()
    assert first["more"] and [it["step"] for it in first["files"]] == [*range(6, page_rollouts.AT_ONCE + 6)]
    second = page.texts()
    assert not second["more"] and {it["rollouts"] for it in second["files"]} == {8}


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
    endless = {"counts": {"trained": 1e-300, "sampled_tokens": 1e300}, "time": 1e300}
    bad.append(json.dumps({"step": 6, "metrics": {"reward": 1.0}, **endless}))
    bad.append("[" * 100_000)
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(f"{it}\n" for it in bad)
    with (folder / "publications.jsonl").open("a") as file:
        file.write('{"version": "v9", "outcome": ["x"], "adapter": 3}\n')
    (folder / "alarms.jsonl").write_text('{"name": ["x"], "step": 1, "text": 3}\n{"name": "y"}\n[]\n')
    (folder / "empty_steps.jsonl").write_text('{"after": "x"}\n{"after": 1, "error": 3}\n')
    far = {"reward": 1.0, "version": -1.7e308, "rollout": "r"}
    odd = {"reward": "much", "completion": 7, "version": True, "prompt": "\ud800", "prompt_cut": "yes"}
    (folder / "rollouts" / "step-000003.jsonl").write_text(f"{json.dumps(odd)}\n[]\nno\n")
    (folder / "rollouts" / "step-000002.jsonl").write_text(f"{json.dumps(far)}\n" * 2)
    page = page_of(store, record)
    found = page.steps()
    page_files.as_json([found, page.step_rollouts("step-3"), page.run(), page.texts(), Pages(store).runs()])
    assert found["steps"] == [1, 2, 3, 4, 6] and found["columns"]["length"][4] is None
    assert found["times"][2] is None and found["columns"]["entropy"][2] is None
    assert found["dropped"] == {} and found["columns"]["counts.samples"][3] is None
    assert [it["step"] for it in found["alarms"]] == [1] and [it["after"] for it in found["empty"]] == [1]
    (line,) = page.step_rollouts("step-3")["lines"]
    assert (line["reward"], line["completion"], line["version"], line["prompt_cut"]) == (
        None,
        "7",
        None,
        False,
    )


def test_a_log_is_read_from_its_end_and_then_as_it_grows(store: RecordStore) -> None:
    record = played_run(store, "dev", steps=1)
    path = store.folder(record.id) / "program.log"
    path.write_text("".join(f"line {number}\n" for number in range(20_000)))
    page = page_of(store, record)
    assert [it["name"] for it in page.logs()] == ["program"]
    end = page.log("program", None)
    assert end is not None and end["text"].startswith("line ") and end["text"].endswith("line 19999\n")
    assert 0 < len(end["text"]) <= 64 * 2**10
    with path.open("a") as file:
        file.write("one more\nhalf a li")
    new = page.log("program", end["end"])
    assert new is not None and (new["text"], new["anew"]) == ("one more\n", False)
    with path.open("a") as file:
        file.write("ne\n")
    rest = page.log("program", new["end"])
    assert rest is not None and rest["text"] == "half a line\n"
    path.write_text("begun anew\n")
    again = page.log("program", rest["end"])
    assert again is not None and (again["text"], again["anew"]) == ("begun anew\n", True)
    assert page.log("../record", None) is None and page.log("trainer", None) is None


def test_a_machine_names_its_logs_as_names_and_none_as_the_launchers_own(store: RecordStore) -> None:
    record = played_run(store, "dev", steps=1)
    (store.folder(record.id) / "program.log").write_text("ours\n")
    logs = results(store, record.id) / "logs"
    logs.mkdir()
    for name in ("trainer", "program", "launch", 'x",0);alert(1);("y', "é" * 40, "a" * 200):
        (logs / f"{name}.log").write_text("theirs\n")
    page = page_of(store, record)
    assert sorted(it["name"] for it in page.logs()) == ["program", "trainer"]
    found = page.log("program", None)
    assert found is not None and found["text"] == "ours\n"


def test_all_runs_are_listed_and_only_they_are_read(store: RecordStore) -> None:
    old = played_run(store, "old", steps=1)
    new = played_run(store, "new", steps=12)
    pages = Pages(store, new.id)
    found = pages.runs()
    assert [it["label"] for it in found["runs"]] == ["new", "old"] and found["current"] == new.id
    first = found["runs"][0]
    assert first["steps"] == 12 and first["validation"]["after"] == [
        pytest.approx(0.8 - 0.55 * 0.98**11),
        0.03,
        11,
    ]
    assert first["reward"][1] == pages.of(new.id).history().column("reward")[-1]
    assert pages.get(f"{old.id}/steps")["steps"] == [1]
    for name in ("slip-00000000/steps", "new/steps", f"{new.id}/../old", f"{new.id}/nothing", "steps", ""):
        assert pages.get(name) is None
    alone = Pages(store, new.id, [new.id])
    assert [it["label"] for it in alone.runs()["runs"]] == ["new"] and alone.get(f"{old.id}/steps") is None


def test_each_setting_has_its_source(store: RecordStore) -> None:
    details = {
        "settings": {"model": "tiny"},
        "runtime": {"train.seed": 3},
        "sources": {"train.seed": "launch.toml"},
    }
    record = store.create(name="dev", details=details)
    assert page_of(store, record).settings() == [
        {"name": "model", "value": "tiny", "source": "default"},
        {"name": "train.seed", "value": 3, "source": "launch.toml"},
    ]
    older = store.create(name="older", details={"settings": {"model": "tiny"}})
    assert page_of(store, older).settings()[0]["source"] == "not recorded"


def test_what_the_steps_and_the_program_have_set_is_among_the_settings(store: RecordStore) -> None:
    details = {"runtime": {"train.learning_rate": 0.002, "train.loss": "grpo"}, "sources": {}}
    record = store.create(name="dev", details=details)
    results = store.folder(record.id) / "results"
    results.mkdir()
    step = {"learning_rate": 0.0001, "loss": "grpo", "schedule_step": 4}
    lines = [{"step": it, "settings": {**step, "learning_rate": it / 1000}} for it in (1, 5)]
    (results / "metrics.jsonl").write_text("".join(f"{json.dumps(it)}\n" for it in lines))
    told = {"kind": "compile", "program": "train.py", "metric": "exact", "steps": 12, "rollouts": 8}
    (results / "grpo.jsonl").write_text(f"{json.dumps(told)}\n")
    assert page_of(store, record).settings() == [
        {"name": "GRPO.metric", "value": "exact", "source": "train.py"},
        {"name": "GRPO.num_train_steps", "value": 12, "source": "train.py"},
        {"name": "GRPO.num_rollouts_per_grpo_step", "value": 8, "source": "train.py"},
        {"name": "train.learning_rate", "value": 0.005, "source": "step 5"},
        {"name": "train.loss", "value": "grpo", "source": "default"},
    ]
    (row,) = Pages(store, record.id).runs()["runs"]
    assert row["settings"]["train.learning_rate"] == 0.005


def test_an_alarm_before_the_first_version_is_after_step_0(store: RecordStore) -> None:
    record = store.create(name="dev")
    results = store.folder(record.id) / "results"
    results.mkdir()
    alarm = {"kind": "alarm", "compile": "c", "name": "truncation", "text": "all cut off"}
    lines = [{"kind": "step", "compile": "c", "version": it} for it in (None, None, 1, None)]
    lines[2:2] = [{**alarm, "step": 2}]
    (results / "grpo.jsonl").write_text(
        "".join(f"{json.dumps(it)}\n" for it in [*lines, {**alarm, "step": 4}])
    )
    assert [it["step"] for it in page_of(store, record).steps()["alarms"]] == [0, 1]


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
