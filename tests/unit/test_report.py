"""`launch report` (B18): a folder for one run or several, and a plot, are what the files say."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from launcher.base.home import Home
from launcher.records.records import RecordStore, RunRecord
from launcher.results import plot, run_history
from launcher.results.run_history import RunHistory
from tests.support.typed import Typed


@pytest.fixture
def launch(tmp_path: Path) -> Typed:
    return Typed(tmp_path / "project", tmp_path / "home")


@pytest.fixture
def store(tmp_path: Path) -> RecordStore:
    return RecordStore(Home.find({"LAUNCH_HOME": str(tmp_path / "home")}))


@pytest.fixture
def finished(store: RecordStore) -> Callable[..., Path]:
    """`finished("name", steps=8)`: a run that ended, with its results; their folder."""

    def make(name: str, steps: int = 8, validated: int = 4, predictors: tuple[str, ...] = ()) -> Path:
        record = store.create(name=name, details={"plan": {"model": "tiny"}})
        results = store.folder(record.id) / "results"
        results.mkdir()
        store.update(record.id, state="verified", ended=record.created + 60)
        if steps:
            write(results / "metrics.jsonl", [metrics(it, predictors) for it in range(1, steps + 1)])
        journal = [compiled(), *(rolled(it) for it in range(1, steps + 1))]
        told = [validation(it) for it in range(0, steps + 1, validated)] if validated else []
        write(results / "grpo.jsonl", [*journal, *({**it, "kind": "validation"} for it in told)])
        if told:
            write(results / "validations.jsonl", told)
        return results

    return make


def write(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(it) + "\n" for it in lines))


def metrics(step: int, predictors: tuple[str, ...] = ()) -> dict[str, Any]:
    measured = {"reward": reward(step), "loss": -0.1 * step, "learning_rate": 1e-3 * (1 - step / 20)}
    measured |= {f"reward/{name}": reward(step) + at for at, name in enumerate(predictors, 1)}
    return {"step": step, "version": step, "metrics": measured}


def reward(step: int) -> float:
    return round(0.1 * step + 0.05 * (-1) ** step, 6)


def compiled() -> dict[str, Any]:
    return {"kind": "compile", "compile": "c1", "program": "optimize.py", "metric": "exact", "steps": 8}


def rolled(step: int, version: int | None = None) -> dict[str, Any]:
    line = {"kind": "step", "compile": "c1", "step": step, "version": version or step, "reward": 0.0}
    return line | {"parse_rate": 1 - step / 100, "cut_off_rate": step / 50}


def validation(step: int, **others: Any) -> dict[str, Any]:
    known = {"compile": "c1", "step": step, "name": "score", "version": step, "score": 0.25 + step / 16}
    return {**known, "standard_error": 0.0625, **others}


def data(results: Path, machine: Path | None = None) -> RunHistory:
    return run_history.read(results, machine)


def value_of(script: Path) -> Any:
    """What a piece of data hands over."""
    said = re.fullmatch(r'slipwayData\("[\w/-]+", (.*)\);\n', script.read_text(), re.DOTALL)
    assert said
    return json.loads(said[1])


def test_b18_the_folder_has_every_number_and_asks_nobody(
    launch: Typed, finished: Callable[..., Path]
) -> None:
    results = finished("dev", predictors=("draft",))
    said = json.loads(launch("report", "dev", "--json").stdout)
    assert said["file"] == str(results / "page" / "index.html")
    (run,) = said["runs"]
    assert (run["label"], run["steps"], run["validations"]) == ("dev", 8, 3)
    found = value_of(results / "page" / "data" / run["id"] / "steps.js")
    steps = range(1, 9)
    assert found["steps"] == [*steps]
    assert found["columns"]["reward"] == [reward(it) for it in steps]
    assert found["columns"]["reward/draft"] == [reward(it) + 1 for it in steps]
    assert found["columns"]["parse_rate"] == [1 - it / 100 for it in steps]
    assert found["columns"]["cut_off_rate"] == [it / 50 for it in steps]
    assert [(it["version"], it["score"], it["standard_error"]) for it in found["validations"]] == [
        (0, 0.25, 0.0625), (4, 0.5, 0.0625), (8, 0.75, 0.0625)
    ]  # fmt: skip
    index = (results / "page" / "index.html").read_text()
    assert not re.search(r"https?://|@import|url\(", index)


def test_b18_several_runs_are_in_one_folder_beside_each_other(
    launch: Typed, finished: Callable[..., Path], tmp_path: Path
) -> None:
    first = finished("small")
    write(first / "validations.jsonl", [validation(0), validation(4, score=0.9), validation(8, score=0.7)])
    finished("large", steps=4)
    finished("empty", steps=0, validated=0)
    to = tmp_path / "both"
    done = launch("report", "small", "large", "empty", "small", "--to", str(to))
    assert (done.returncode, done.stdout) == (0, f"{to / 'index.html'}\n"), done.stderr
    assert "empty is left out: it has no step and no validation yet\n" in done.stderr
    listed = value_of(to / "data" / "runs.js")
    assert [it["label"] for it in listed["runs"]] == ["small", "large"] and listed["current"] is None
    # Nobody said which was best, so it is the one with the best mean.
    assert listed["runs"][0]["validation"] == {
        "before": [0.25, 0.0625, 0], "after": [0.7, 0.0625, 8], "best": [0.9, 0.0625, 4]
    }  # fmt: skip
    assert listed["runs"][1]["validation"]["best"] == [0.5, 0.0625, 4]
    again = launch("report", "small", "large", "--to", str(to))
    assert again.returncode == 0, again.stderr


def test_b18_a_folder_that_holds_something_else_is_left_alone(
    launch: Typed, finished: Callable[..., Path], tmp_path: Path
) -> None:
    finished("dev")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    done = launch("report", "dev", "--to", str(tmp_path / "mine"))
    assert done.returncode == 2 and "holds something else" in done.stderr
    assert [it.name for it in (tmp_path / "mine").iterdir()] == ["thesis.tex"]


def test_b18_a_plot_has_the_files_numbers(
    finished: Callable[..., Path], tmp_path: Path, monkeypatch: Any
) -> None:
    figures: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k)))
    first, second = finished("one"), finished("two", steps=4)
    plot.write(tmp_path / "both.png", {"one": data(first), "two": data(second)})
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")
    rewards, scores = figures[0].axes
    each, smooth, other, _ = rewards.lines
    assert [*each.get_ydata()] == [reward(it) for it in range(1, 9)]
    assert [*smooth.get_ydata()] == plot.smoothed([reward(it) for it in range(1, 9)])
    assert [*other.get_xdata()] == [1, 2, 3, 4]
    lines = [it.lines[0] for it in scores.containers]
    assert [[*it.get_ydata()] for it in lines] == [[0.25, 0.5, 0.75], [0.25, 0.5]]
    assert [it.get_text() for it in rewards.get_legend().get_texts()] == ["one", "two"]


def test_b18_a_plot_is_a_file_of_each_form_and_without_matplotlib_it_is_named(
    launch: Typed, finished: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished("dev", validated=0)
    for form in plot.FORMATS:
        to = tmp_path / f"r{form}"
        done = launch("report", "dev", "--to", str(to))
        assert (done.returncode, done.stdout) == (0, f"{to}\n"), done.stderr
        assert to.stat().st_size > 1_000
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = launch("report", "dev", "--to", str(tmp_path / "r.png"))
    assert done.returncode == 3 and "a plot needs matplotlib" in done.stderr
    assert re.search(r"Hint: uv pip install --python \S+ matplotlib\n", done.stderr)


def test_b18_runs_of_one_name_are_two_curves(
    launch: Typed, finished: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[list[str]] = []
    monkeypatch.setattr(plot, "write", lambda file, runs: drawn.append([*runs]))
    ids = [finished("again").parent.name, finished("again").parent.name]
    launch("report", *ids, "--to", str(tmp_path / "r.png"))
    assert drawn == [[f"again {it}" for it in ids]]


def test_b18_the_best_is_the_optimizers_word(finished: Callable[..., Path]) -> None:
    results = finished("dev")
    told = [validation(0), validation(4), validation(8)]
    journal = [
        {**it, "kind": "validation", "best": best} for it, best in zip(told, (True, True, False), strict=True)
    ]
    write(results / "grpo.jsonl", [compiled(), *journal])
    (trained,) = data(results).trained
    assert (trained.before.step, trained.after.step, trained.best.step) == (0, 8, 4)
    assert trained.program == "optimize.py"


def test_b18_a_live_run_is_as_its_machine_has_it_and_an_ended_one_as_it_came_home(
    launch: Typed, store: RecordStore, finished: Callable[..., Path]
) -> None:
    results = finished("dev")
    machine = results.parent / "machine"
    machine.mkdir()
    write(machine / "metrics.jsonl", [metrics(it) for it in range(1, 13)])
    record = store.load("dev")
    store.update(record.id, machine={"kind": "local", "state_dir": str(machine)})
    assert steps_of(launch, record) == 8
    store.update(record.id, state="work", ended=None)
    assert steps_of(launch, record) == 12


def steps_of(launch: Typed, record: RunRecord) -> int:
    return json.loads(launch("report", record.id, "--json").stdout)["runs"][0]["steps"]


def test_b18_a_run_without_anything_and_one_that_is_not_known(
    launch: Typed, finished: Callable[..., Path]
) -> None:
    finished("nothing", steps=0, validated=0)
    done = launch("report", "nothing")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.splitlines() == [
        "Error: there is nothing to show yet for nothing",
        "  none of its steps and validations is on this computer",
        "Hint: launch logs nothing",
    ]
    done = launch("report", "unknown")
    assert done.returncode == 2 and "there is no run 'unknown'" in done.stderr


def test_b18_what_went_with_a_lost_machine_is_not_shown(finished: Callable[..., Path]) -> None:
    results = finished("dev")
    first = [rolled(1), rolled(2), {**validation(2), "kind": "validation"}, rolled(3)]
    again = [rolled(2, version=2) | {"parse_rate": 0.5}]
    write(results / "grpo.jsonl", [compiled(), *first, *again])
    write(results / "metrics.jsonl", [metrics(1), metrics(2)])
    (results / "validations.jsonl").unlink()
    found = data(results)
    assert (found.steps, found.column("parse_rate")) == ([1, 2], [0.99, 0.5])
    assert found.validations == []


def test_b18_damaged_lines_are_passed_over(finished: Callable[..., Path]) -> None:
    results = finished("dev", validated=0)
    (results / "metrics.jsonl").write_text(
        '{"step": 1, "metrics": {"reward": NaN, "loss": 1.0}}\n[]\n{"step": "2", "metrics": {}}\n'
        '{"step": 3, "metrics": null}\n{"step": 4, "metrics": {}}\n'
        '{"step": 5, "metrics": {"reward": true}}\n{"step": 6, "metrics": {"reward": 0.5}}\n{"step": 7, "me'
    )
    (results / "validations.jsonl").write_text(
        '{"compile": "c", "step": 1}\n{"step": 2, "score": Infinity}\n'
    )
    write(results / "grpo.jsonl", [])
    found = data(results)
    assert (found.steps, found.column("reward"), found.column("loss")) == ([1, 6], [None, 0.5], [1.0, None])
    assert found.validations == []


@pytest.mark.parametrize("name", ["report.html", "report.txt"])
def test_b18_only_what_can_be_made_is_promised(
    launch: Typed, finished: Callable[..., Path], name: str
) -> None:
    finished("dev")
    done = launch("report", "dev", "--to", name)
    assert done.returncode == 2
    assert done.stderr.endswith("Hint: launch report dev --to report\n")
    assert launch("report", "dev", "--to", "no/such/folder/report.svg").returncode == 3


def test_b18_the_smooth_line_is_the_trackers_and_its_end_is_as_smooth_as_the_rest() -> None:
    values = [float(it % 2) for it in range(40)]
    for at, found in enumerate(plot.smoothed(values), 1):
        weights = [0.8**age for age in range(at)]
        mean = sum(weight * values[at - 1 - age] for age, weight in enumerate(weights)) / sum(weights)
        assert found == pytest.approx(mean)
    assert plot.smoothed([0.5] * 40) == pytest.approx([0.5] * 40)
    assert plot.smoothed([]) == []
