"""What an example says of its training's effect, however often it was resumed: the base is its "before"."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.environment import REPOSITORY
from tests.support.lives import begin_life
from tests.support.pretend_rollouts import form
from tests.support.small_run import TOKEN, Asked, SmallRun
from tests.unit.test_examples import EXAMPLES, load

STEPS = 12


def learned(asked: Asked) -> str:
    """Right in one phrase of five by the base, and in one more of five for each five steps."""
    place = sum(asked.user.encode())
    right = place % 5 <= (asked.version or 0) // 5
    return form(asked, RIGHT[asked.user.partition("]]\n")[2].partition("\n")[0]] if right else "non")


RIGHT: dict[str, str] = {}


class Quickstart:
    """The program, small, with one life after the other in this process; `folder` is its run's."""

    def __init__(self, run: SmallRun, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._run, self._patch, self.folder = run, patch, folder
        module = load("quickstart")
        patch.setattr(module, "HELD_OUT", 40)
        patch.setattr(module, "VALIDATION", 5)
        patch.setitem(module.EXAMPLES_PER_STEP, "right", 2)
        for held_out in (False, True):
            RIGHT.update({it.english: it.french for it in module.phrases(240, 0, held_out)})
        self._main = module.main
        for name, value in (
            ("LAUNCH_BASE_URL", run.base_url),
            ("LAUNCH_API_KEY", TOKEN),
            ("LAUNCH_RUN_DIR", str(folder)),
        ):
            patch.setenv(name, value)

    def live(self, steps: int) -> None:
        begin_life(self._patch, self._run.version)
        self._patch.setattr(sys, "argv", ["quickstart.py", "--steps", str(steps)])
        self._main()

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())

    def files(self) -> dict[str, bytes]:
        return {name: (self.folder / name).read_bytes() for name in ("summary.json", "reward.png")}


@pytest.fixture
def quickstart(run: SmallRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Quickstart:
    run.answer = learned
    return Quickstart(run, tmp_path, monkeypatch)


@pytest.mark.process
def test_n01_a_resumed_example_has_the_base_as_its_before(
    quickstart: Quickstart, capsys: pytest.CaptureFixture[str]
) -> None:
    quickstart.live(9)
    base = quickstart.summary["before"]["score"]
    quickstart.live(STEPS)
    said = capsys.readouterr()
    assert f"resuming after 9 of {STEPS} steps" in said.err
    summary = quickstart.summary
    assert (summary["before"]["version"], summary["before"]["score"]) == (0, base)
    assert summary["after"]["score"] > summary["before"]["score"] + 0.2
    assert summary["rise"] == pytest.approx(summary["after"]["score"] - base)


@pytest.mark.process
def test_n01_a_training_that_had_finished_says_so_and_its_figures_stay(
    quickstart: Quickstart, capsys: pytest.CaptureFixture[str]
) -> None:
    quickstart.live(STEPS)
    before = quickstart.files()
    capsys.readouterr()
    quickstart.live(STEPS)
    assert quickstart.files() == before
    said = capsys.readouterr()
    assert "this optimizer finished before the program was restarted" in said.err
    assert "had finished before" in said.out
    (quickstart.folder / "summary.json").unlink()
    quickstart.live(STEPS)
    found, was = quickstart.summary, json.loads(before["summary.json"])
    for name in ("before", "after", "rise", "steps"):
        assert found[name] == was[name], "killed after its last step, before it had written them"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_n01_every_example_asks_the_base_for_its_before(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Assign) and [ast.unparse(it) for it in node.targets] == ["before"]:
            asked = [ast.unparse(it) for it in ast.walk(node.value) if isinstance(it, ast.Constant)]
            assert "'base'" in asked or "words" in ast.unparse(node.value), ast.unparse(node)


@pytest.mark.process
def test_the_loop_goes_on_at_the_step_that_it_was_killed_after(
    run: SmallRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = load("loop")
    for held in module.phrases():
        RIGHT.update(held)
    run.answer, run.metrics = learned, {"reward": 0.5}
    monkeypatch.setattr(module, "PHRASES_PER_STEP", 3)
    _be_in(run, monkeypatch)
    for steps in (1, 2):
        monkeypatch.setattr(sys, "argv", ["loop.py", "--steps", str(steps)])
        module.main()
    said = capsys.readouterr().out
    assert [run.requests[number].client_state for number in (1, 2)] == [{"loop": 1}, {"loop": 2}]
    assert all(len(it.groups) == 3 for it in run.requests.values())
    assert said.count("step 1/") == said.count("step 2/2") == 1
    assert said.count("before: ") == said.count("held-out: ") == 2


@pytest.mark.process
def test_the_shortest_program_trains_and_says_what_came_of_it(
    run: SmallRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = (REPOSITORY / "examples" / "hello.py").read_text()
    task, _, program = source.partition("\nprogram = ")
    names: dict[str, Any] = {}
    exec(task, names)  # noqa: S102 - the example itself
    RIGHT.update(names["pairs"])
    english = [{it.english for it in names[part]} for part in ("train", "held_out")]
    assert not english[0] & english[1]
    run.answer = learned
    _be_in(run, monkeypatch)
    begin_life(monkeypatch)
    exec(f"program = {program}", names)  # noqa: S102 - the example itself
    found = re.fullmatch(r"held-out: (\S+) → (\S+) of 50 phrases are right\n", capsys.readouterr().out)
    assert found is not None and float(found[1]) < float(found[2])
    assert run.version == 15


def _be_in(run: SmallRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAUNCH_BASE_URL", run.base_url)
    monkeypatch.setenv("LAUNCH_API_KEY", TOKEN)
