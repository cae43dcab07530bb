"""`launch report` (B18): what is drawn is what the files say, offline, of runs in every state."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from launcher.base.home import Home
from launcher.console import charts
from launcher.console.charts import Chart, ChartLine, Point, as_text, ticks
from launcher.records.records import RecordStore, RunRecord
from launcher.results import report_data, report_page
from launcher.results.report_data import ReportedStep, RunData
from tests.support.typed import Typed

SVG = "{http://www.w3.org/2000/svg}"
STOPPED = "Share of tokens past a bound of the loss, by their age"
Drawn = tuple[str, list[tuple[float, float]]]


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


def drawn(picture: str) -> dict[str, list[Drawn]]:
    """By a chart's title: its lines' colours, and their points as numbers, read back off its own axes."""
    found: dict[str, list[Drawn]] = {}
    for chart in ElementTree.fromstring(picture).iter(f"{SVG}g"):
        texts = list(chart.iter(f"{SVG}text"))
        title = "".join(texts[0].itertext())
        up = axis([it for it in texts if it.get("text-anchor") == "end" and it.text != "step"], "y", -4)
        across = axis([it for it in texts if it.get("text-anchor") == "middle"], "x")
        found[title] = [
            (it.get("stroke", ""), [(across(x), up(y)) for x, y in places(it.get("points", ""))])
            for it in chart.iter(f"{SVG}polyline")
        ]
    return found


def axis(labels: list[ElementTree.Element], name: str, moved: float = 0.0) -> Callable[[float], float]:
    """From a place to a value, by the first and the last label; a whole test of what an axis says."""
    marks = [(float(it.get(name, "")) + moved, float(it.text or "")) for it in labels]
    (begin, low), (end, high) = marks[0], marks[-1]
    for place, value in marks:
        assert place == pytest.approx(begin + (value - low) / (high - low) * (end - begin), abs=0.2)
    return lambda place: low + (place - begin) / (end - begin) * (high - low)


def places(points: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in (it.split(",") for it in points.split())]


def close(found: list[tuple[float, float]], expected: list[tuple[float, float]]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, abs=0.02)


def numbers(page: str) -> dict[str, Any]:
    (said,) = re.findall(r'<script type="application/json" id="numbers">(.*)</script>', page)
    return json.loads(said)


def test_b18_the_pictures_lines_are_the_files_numbers(
    launch: Typed, finished: Callable[..., Path], tmp_path: Path
) -> None:
    finished("dev", predictors=("draft", "judge"))
    to = tmp_path / "report.svg"
    done = launch("report", "dev", "--to", str(to))
    assert (done.returncode, done.stdout) == (0, f"{to}\n"), done.stderr
    found = drawn(to.read_text())
    assert list(found) == [
        "Training reward",
        "Validation score (± one standard error)",
        "Share of runs whose answers parsed, or were cut off",
        "Learning rate",
    ]
    steps = range(1, 9)
    each, mean, draft, judge = (points for _, points in found["Training reward"])
    close(each, [(it, reward(it)) for it in steps])
    close(mean, [(it, reward(it)) for it in steps])  # of so few steps each is its own mean
    close(draft, [(it, reward(it) + 1) for it in steps])
    close(judge, [(it, reward(it) + 2) for it in steps])
    ((_, scores),) = found["Validation score (± one standard error)"]
    close(scores, [(0, 0.25), (4, 0.5), (8, 0.75)])
    parsed, cut_off = (points for _, points in found["Share of runs whose answers parsed, or were cut off"])
    close(parsed, [(it, 1 - it / 100) for it in steps])
    close(cut_off, [(it, it / 50) for it in steps])
    ((_, rates),) = found["Learning rate"]
    assert [y for _, y in rates] == pytest.approx([1e-3 * (1 - it / 20) for it in steps], rel=0.01)
    assert "step 4: 0.5 ±0.062" in to.read_text()


def test_b18_the_page_has_every_number_and_asks_nobody(launch: Typed, finished: Callable[..., Path]) -> None:
    results = finished("dev", predictors=("draft",))
    done = launch("report", "dev", "--json")
    said = json.loads(done.stdout)
    assert said["file"] == str(results / "report.html")
    assert [(it["label"], it["steps"], it["validations"]) for it in said["runs"]] == [("dev", 8, 3)]
    page = (results / "report.html").read_text()
    (run,) = numbers(page)["runs"]
    assert (run["label"], run["model"], run["state"]) == ("dev", "tiny", "ended")
    assert [(it["step"], it["reward"], it["predictors"]) for it in run["steps"]] == [
        (it, reward(it), {"draft": reward(it) + 1}) for it in range(1, 9)
    ]
    assert [(it["version"], it["score"], it["standard_error"]) for it in run["validations"]] == [
        (0, 0.25, 0.0625), (4, 0.5, 0.0625), (8, 0.75, 0.0625)
    ]  # fmt: skip
    assert "0.250 ±0.062 (step 0)" in page and "0.750 ±0.062 (step 8)" in page
    links = set(re.findall(r"https?://[^\s\"'<>]+", page))
    assert links == {"http://www.w3.org/2000/svg"}  # a name of a language, which nobody fetches
    assert not re.search(r"\b(?:src|href)\s*=|@import|url\(", page)


def test_b18_several_runs_are_compared_with_their_errors(
    launch: Typed, finished: Callable[..., Path], tmp_path: Path
) -> None:
    first = finished("small")
    write(first / "validations.jsonl", [validation(0), validation(4, score=0.9), validation(8, score=0.7)])
    finished("large", steps=4)
    finished("empty", steps=0, validated=0)
    to = tmp_path / "both.svg"
    done = launch("report", "small", "large", "empty", "small", "--to", str(to))
    assert done.returncode == 0
    assert done.stderr == "empty is left out: it has no step and no validation yet\n"
    bars, *_ = ElementTree.fromstring(to.read_text()).iter(f"{SVG}g")
    titles = ["".join(it.itertext()) for it in bars.iter(f"{SVG}rect") if len(it)]
    # Nobody said which was best, so it is the one with the best mean.
    assert titles == [
        "before: 0.25 ±0.062", "after: 0.7 ±0.062", "best: 0.9 ±0.062",
        "before: 0.25 ±0.062", "after: 0.5 ±0.062", "best: 0.5 ±0.062",
    ]  # fmt: skip
    up = axis([it for it in bars.iter(f"{SVG}text") if it.get("text-anchor") == "end"], "y", -4)
    tops = [up(float(it.get("y", ""))) for it in bars.iter(f"{SVG}rect") if len(it)]
    assert tops == pytest.approx([0.25, 0.7, 0.9, 0.25, 0.5, 0.5], abs=0.01)
    errors = [re.findall(r"[MV](?:[\d.]+ )?([\d.]+)", it.get("d", ""))[:2] for it in bars.iter(f"{SVG}path")]
    assert [abs(up(float(low)) - up(float(high))) for low, high in errors] == pytest.approx(
        [0.125] * 6, abs=0.01
    )
    names = ["".join(it.itertext()) for it in bars.iter(f"{SVG}text")]
    assert "small" in names and "large" in names
    assert sum("Training reward" in it for it in drawn_titles(to)) == 2


def drawn_titles(picture: Path) -> list[str]:
    root = ElementTree.fromstring(picture.read_text())
    return ["".join(next(it.iter(f"{SVG}text")).itertext()) for it in root.iter(f"{SVG}g")]


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


def data(results: Path, machine: Path | None = None) -> RunData:
    return report_data.read(results, machine, label="dev", run_id="slip-1", model="tiny", state="live")


def test_b18_a_live_run_is_drawn_as_its_machine_has_it_and_an_ended_one_as_it_came_home(
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


def test_b18_a_run_without_validations_one_without_steps_and_one_without_anything(
    launch: Typed, finished: Callable[..., Path], tmp_path: Path
) -> None:
    to = tmp_path / "r.svg"
    finished("unvalidated", validated=0)
    assert launch("report", "unvalidated", "--to", str(to)).returncode == 0
    assert not [it for it in drawn_titles(to) if "Validation" in it]
    scored = finished("scored", steps=0)
    write(scored / "validations.jsonl", [validation(0)])
    assert launch("report", "scored", "--to", str(to)).returncode == 0
    assert drawn_titles(to) == ["Validation score (± one standard error)"]
    finished("nothing", steps=0, validated=0)
    done = launch("report", "nothing")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.splitlines() == [
        "Error: there is nothing to draw yet for nothing yet",
        "  none of its steps and validations is on this computer",
        "Hint: launch logs nothing",
    ]
    done = launch("report", "unknown")
    assert done.returncode == 2 and "there is no run 'unknown'" in done.stderr


def test_b18_a_supervised_run_has_its_loss(finished: Callable[..., Path]) -> None:
    results = finished("dev", validated=0)
    lines = [{"step": it, "metrics": {"loss": 2.0 / it}} for it in (1, 2, 3)]
    write(results / "metrics.jsonl", lines)
    write(results / "grpo.jsonl", [])
    (chart,) = report_page.charts([data(results)])
    assert isinstance(chart, Chart)
    assert [(it.x, it.y) for it in chart.lines[0].points] == [(1, 2.0), (2, 1.0), (3, 2.0 / 3)]


def test_b18_what_went_with_a_lost_machine_is_not_drawn(finished: Callable[..., Path]) -> None:
    results = finished("dev")
    first = [rolled(1), rolled(2), {**validation(2), "kind": "validation"}, rolled(3)]
    again = [rolled(2, version=2) | {"parse_rate": 0.5}]
    write(results / "grpo.jsonl", [compiled(), *first, *again])
    write(results / "metrics.jsonl", [metrics(1), metrics(2)])
    (results / "validations.jsonl").unlink()
    found = data(results)
    assert [(it.step, it.parse_rate) for it in found.steps] == [(1, 0.99), (2, 0.5)]
    assert found.validations == []


def test_b18_damaged_lines_are_passed_over_and_numbers_that_are_none_are_not_drawn(
    finished: Callable[..., Path],
) -> None:
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
    assert [(it.step, it.reward, it.loss) for it in found.steps] == [(1, None, 1.0), (6, 0.5, None)]
    assert found.validations == []
    ElementTree.fromstring(report_page.svg([found]))


def test_b18_of_a_stale_run_what_the_clip_stopped_is_drawn_by_age(finished: Callable[..., Path]) -> None:
    results = finished("dev", steps=3, validated=0)
    lines = [metrics(it) for it in range(1, 4)]
    aged = {1: (40.0, 0.1, 2.0), 2: (10.0, 0.3, 0.0)}  # tokens, what of them the clip stopped, and dual_clip
    for lag, (tokens, clipped, masked) in aged.items():
        told = {"trained_tokens": tokens, "clip_fraction": clipped, "masked_tokens": masked}
        lines[2]["metrics"] |= {f"lag{lag}/{name}": value for name, value in told.items()}
    lines[1]["metrics"] |= {
        "lag1/trained_tokens": 20.0,
        "lag1/clip_fraction": 0.25,
        "lag1/masked_tokens": 0.0,
    }
    lines[1]["metrics"] |= {
        "lag2/trained_tokens": 0.0,
        "lag2/clip_fraction": "much",
        "lagging/trained_tokens": 1,
    }
    write(results / "metrics.jsonl", lines)
    run = report_data.read(results, None, label="dev", run_id="dev", model="tiny", state="ended")
    assert [it.stopped for it in run.steps] == [{}, {1: 0.25}, {1: pytest.approx(0.15), 2: 0.3}]
    one, two = (points for _, points in drawn(report_page.svg([run]))[STOPPED])
    close(one, [(2, 0.25), (3, 0.15)])
    close(two, [(3, 0.3)])
    assert "1 step old" in report_page.svg([run]) and "2 steps old" in report_page.svg([run])
    assert numbers(report_page.html([run]))["runs"][0]["steps"][2]["stopped"] == {
        "1": pytest.approx(0.15),
        "2": 0.3,
    }


def test_b18_names_are_text_in_a_page_and_never_its_code(finished: Callable[..., Path]) -> None:
    evil = "</script><img src=x onerror=alert(1)>"
    results = finished("dev", predictors=(evil, "b"))
    write(results / "validations.jsonl", [validation(0, compile=evil), validation(0, compile="other")])
    page = report_page.html([data(results)])
    assert "<img" not in page and page.count("<script") == page.count("</script>") == 1
    assert evil in numbers(page)["runs"][0]["steps"][0]["predictors"]
    ElementTree.fromstring(report_page.svg([data(results)]))


@pytest.mark.parametrize("name", ["report.png", "report"])
def test_b18_only_what_can_be_drawn_is_promised(
    launch: Typed, finished: Callable[..., Path], name: str
) -> None:
    finished("dev")
    done = launch("report", "dev", "--to", name)
    assert done.returncode == 2
    assert done.stderr.endswith("Hint: launch report dev --to report.html\n")
    assert launch("report", "dev", "--to", "no/such/folder/report.svg").returncode == 3


def test_b18_the_smooth_line_is_the_mean_around_each_step() -> None:
    steps = [ReportedStep(it, float(it % 2)) for it in range(1, 41)]
    count, points = report_page.smoothed(steps)
    assert count == 9
    assert [it.x for it in points] == list(range(1, 41))
    for at, point in enumerate(points):
        reach = min(4, at, 39 - at)
        part = [it.reward or 0.0 for it in steps[at - reach : at + reach + 1]]
        assert point.y == pytest.approx(sum(part) / len(part))
    straight = [ReportedStep(it, 0.5 * it) for it in range(1, 41)]
    assert [it.y for it in report_page.smoothed(straight)[1]] == pytest.approx(
        [0.5 * it for it in range(1, 41)]
    )


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 1.0), (0.11, 0.53), (-3.0, 7.5), (5.0, 5.0), (0.0, 0.0), (1e-5, 2e-5), (0, 1e6)]
)
def test_b18_an_axis_has_round_numbers_and_takes_in_its_ends(low: float, high: float) -> None:
    found = ticks(low, high)
    assert found[0] <= low and found[-1] >= high * (1 - 1e-9)
    assert 2 <= len(found) <= 8
    assert len({as_text(it) for it in found}) == len(found)
    step = found[1] - found[0]
    assert f"{step:e}"[:3] in ("1.0", "2.0", "2.5", "5.0")


def test_b18_one_point_alone_is_drawn() -> None:
    picture = charts.page([Chart("one", [ChartLine("a", [Point(3, 0.5, 0.1)], "marks")])], "title")
    assert "step 3: 0.5 ±0.1" in picture
    ElementTree.fromstring(picture)
