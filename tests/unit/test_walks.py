"""Six values from where they come in to where they act: each walk is as the code has it, and short.

The rows are in `walks.toml`, and what each of them means.
"""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.walks import Stop, Walks
from tests.unit.test_tree import FLOORS, ROOT

MOST_FILES = 12
MOST_CLIMBS = 2
# The launcher stands above the runtime, of whose light modules it imports some.
JUDGE = Walks(ROOT, [*FLOORS["runtime"], *FLOORS["launcher"], *FLOORS["client"]])
WALKS = {
    name: [Stop(*row) for row in walk["stops"]]
    for name, walk in tomllib.loads(Path(__file__).with_name("walks.toml").read_text("utf-8")).items()
}


@pytest.mark.parametrize("name", WALKS)
def test_the_code_has_each_step_of_a_walk(name: str) -> None:
    assert JUDGE.problems(WALKS[name]) == []


@pytest.mark.parametrize("name", WALKS)
def test_a_walk_is_short_and_climbs_seldom(name: str) -> None:
    assert len({stop.file for stop in WALKS[name]}) <= MOST_FILES
    assert len(JUDGE.climbs(WALKS[name])) <= MOST_CLIMBS


@pytest.mark.parametrize(
    ("at", "changes", "why"),
    [
        ("_run", {"file": "launcher/cli/verbs.py"}, "there is no such file"),
        ("parse_request", {"function": "parse_requests"}, "there is no such function"),
        ("resolve", {"name": "learning_rates"}, "nothing is called learning_rates"),
        ("launch_run", {"function": "_resume_point", "name": "parsed"}, "does not call it"),
        ("_overrides", {"way": "back"}, "it has not called"),
        ("Run._runtime_config", {"way": "kept _home"}, "it keeps no _home"),
        ("main", {"way": "over runtime.yaml"}, "runtime.yaml is not on both sides"),
        ("LocalMachine.serve", {"way": "by launcher/types/machine.py:Proof"}, "nothing is called serve"),
        ("supervise", {"way": "through main"}, "is no way"),
    ],
)
def test_a_walk_that_the_code_has_not_is_refused(at: str, changes: dict[str, str], why: str) -> None:
    walk = list(WALKS["--set train.learning_rate"])
    place = next(place for place, stop in enumerate(walk) if stop.function == at)
    walk[place] = replace(walk[place], **changes)
    assert any(why in problem for problem in JUDGE.problems(walk))


@pytest.mark.parametrize("name", WALKS)
def test_a_walk_with_a_function_left_out_is_refused(name: str) -> None:
    """Whichever it is, where its file has no other and the value goes on from there to yet another."""
    walk = WALKS[name]
    files = [stop.file for stop in walk]
    only = [place for place in range(1, len(walk) - 1) if files.count(files[place]) == 1]
    for place in (it for it in only if walk[it + 1].way.split()[:1] not in (["back"], ["over"])):
        assert JUDGE.problems([*walk[:place], *walk[place + 1 :]]), walk[place]


def test_a_step_to_a_higher_folder_is_a_climb_and_one_to_a_lower_is_none() -> None:
    low, high = (Stop(f"launcher/{file}.py", "f", "x") for file in ("base/units", "run/run"))
    assert (JUDGE.climbs([low, high]), JUDGE.climbs([high, low])) == ([high], [])
