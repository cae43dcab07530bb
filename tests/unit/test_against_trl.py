"""The comparison with TRL's trainer: both sides are told the same, and what they left is judged rightly."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import dspy
import pytest

from examples import quickstart
from launcher.bench import slipway_side
from launcher.bench.cpu_seconds import ALL
from launcher.bench.workload import Workload
from launcher.client import GRPO
from runtime import bootstrap
from tests.bench.trl import trl_side
from tests.bench.trl.report import Compared
from tests.bench.trl.side_by_side import Pair, lines, rewards_over, seconds_to
from tests.unit.test_bench import run_of

sys.path.insert(0, str(Path(slipway_side.__file__).parent / "programs"))
sys.path.insert(0, str(Path(trl_side.__file__).parent))
import parsed_answer
import scored_answer

TASK = Workload(steps=2).task(0, Path("model"))


def pins(path: Path) -> dict[str, str]:
    """Name → version of a requirement file."""
    return dict(re.findall(r"^([\w.-]+)==(\S+)", path.read_text(), re.MULTILINE))


def test_the_other_side_is_asked_what_dspy_asks() -> None:
    asked = dspy.ChatAdapter().format(dspy.Signature("english -> french"), [], {"english": "the cat"})
    assert [it["content"] for it in asked] == [TASK["system"], TASK["user"].replace("{english}", "the cat")]


@pytest.mark.parametrize(
    "answer",
    [
        "[[ ## french ## ]]\nle chat\n\n[[ ## completed ## ]]\n",
        "[[ ## french ## ]] le chat",
        "before\n[[ ## french ## ]]\nle\nchat\n[[ ## other ## ]]\nrest",
        "[[ ## french ## ]]\nle chat\n[[ ## french ## ]]\nla chatte\n[[ ## completed ## ]]",
        "[[ ## french ## ]]\nle chat [[ ## completed ## ]]",
        "  [[ ## french ## ]]  \n\n  deux  \n",
        "[[ ## french ## ]]",
        "le chat",
        "",
        "[[ ## english ## ]]\nthe cat",
    ],
)
def test_the_other_sides_answers_are_read_as_dspy_reads_them(answer: str) -> None:
    try:
        found = dspy.ChatAdapter().parse(dspy.Signature("english -> french"), answer)["french"]
    except dspy.utils.exceptions.AdapterParseError:
        found = None
    assert parsed_answer.french_of(answer) == found


def test_an_answer_is_worth_the_same_on_both_sides() -> None:
    example = dspy.Example(french="")
    for text in ("le chat", "La Fille, à l'été", "sœur", "", "1234"):
        rewarded = quickstart.unique_letters(example, dspy.Prediction(french=text))
        assert rewarded == scored_answer.letters(text)
        assert parsed_answer.reward(f"[[ ## french ## ]]\n{text}", cut_off=False) == rewarded
    failure = inspect.signature(GRPO).parameters["format_failure_score"].default
    assert parsed_answer.reward("[[ ## french ## ]]\nle chat", cut_off=True) == failure
    assert parsed_answer.reward("le chat", cut_off=False) == failure


def test_both_sides_have_the_same_torch_transformers_and_peft() -> None:
    theirs, ours = pins(trl_side.REQUIREMENTS / "trl.txt"), pins(bootstrap.REQUIREMENTS / "cpu.txt")
    assert {name: theirs[name] for name in ("torch", "transformers", "peft")} == {
        name: ours[name] for name in ("torch", "transformers", "peft")
    }
    asked = pins(trl_side.REQUIREMENTS / "trl.in")
    assert {name: theirs[name] for name in asked} == asked


def test_the_steps_that_warm_up_are_not_in_the_median() -> None:
    ours = run_of("ours", [100.0] * 5 + [1.0, 2.0, 3.0], [1.0] * 8)
    theirs = run_of("trl", [1.0] * 5 + [4.0] * 3, [1.0] * 8)
    pair = Pair.of(ours, theirs, first_step=6)
    assert pair.step_seconds == (2.0, 4.0)
    assert pair.step_ratio == 0.5


def test_both_must_reach_nine_tenths_of_the_lower_final_reward() -> None:
    """Of the last five: 10 and 20, so both must reach 9, as a mean of five steps."""
    ours = run_of("ours", [2.0] * 10, [0.0] * 5 + [10.0] * 5)
    theirs = run_of("trl", [3.0] * 10, [0.0, 0.0, 0.0] + [20.0] * 7)
    pair = Pair.of(ours, theirs, first_step=6)
    assert pair.reward == 9.0
    assert pair.reward_seconds == (20.0, 18.0)  # after step 10, and after step 6: three of five are 20
    assert pair.reward_ratio == pytest.approx(20 / 18)
    step, reward = lines([pair], 6, 10)
    assert (step.met, reward.met) == (False, False)


def test_a_reward_below_nothing_is_no_goal_and_one_never_reached_has_no_ratio() -> None:
    low = run_of("ours", [1.0] * 6, [-1.0] * 6)
    pair = Pair.of(low, run_of("trl", [1.0] * 6, [20.0] * 6), first_step=6)
    assert (pair.reward, pair.reward_ratio) == (None, None)
    fallen = Pair(0, (1.0, 2.0), 18.0, (None, 30.0))
    assert fallen.reward_ratio is None
    reached = Pair(1, (1.0, 2.0), 18.0, (10.0, 30.0))
    assert lines([fallen, reached], 6, 40)[1].met is None, "the median of those that did would be too good"


def test_what_a_short_run_shows_is_a_mean_of_what_there_is() -> None:
    ours = run_of("ours", [1.0, 1.0], [2.0, 4.0])
    assert rewards_over(ours, 5) == [3.0]
    assert seconds_to(ours, 3.0, 5) == 2.0
    assert ours.median_seconds(Workload(steps=2).first_step) == 1.0


def compared(steps: int, ours: float, theirs: float, busy: Sequence[float]) -> Compared:
    """A comparison whose steps took so long on two cores, of which others used so much at each seed."""
    computer = {"cores": 2, "processor": "a processor", "memory_gib": 24.0}
    found = Compared(Workload(steps, len(busy)), computer, "folder")
    for seed, others in enumerate(busy):
        pair = []
        for side, seconds in ((slipway_side.NAME, ours), (trl_side.NAME, theirs)):
            run = run_of(side, [seconds] * steps, [10.0] * steps)
            load = {"busy_before": others, "busy_meanwhile": 0.05, "load_before": 0.1, "load_after": 1.5}
            computed = {"training": {"trainer": steps * seconds, ALL: 1.25 * steps * seconds}}
            pair.append(dataclasses.replace(run, seed=seed, computer=load, cpu_seconds=computed))
        found.runs += pair
        found.pairs.append(Pair.of(*pair, found.shape.first_step))
    return found


def test_what_is_found_is_an_object_and_a_table_that_says_what_it_is_worth() -> None:
    found = compared(40, 1.0, 2.0, busy=[0.01, 0.02, 0.01])
    data = json.loads(json.dumps(found.to_dict()))
    assert [(line["ratio"], line["met"]) for line in data["lines"]] == [(0.5, True), (0.5, True)]
    assert data["no_record_because"] == []
    assert "a step, median of steps 6 to 40" in found.text() and "0.50 met" in found.text()
    assert "no record" not in found.text() and "nobody" not in found.text()


def test_what_is_no_record_is_not_judged_and_says_why() -> None:
    found = compared(40, 1.0, 2.0, busy=[0.01, 0.4])
    data = json.loads(json.dumps(found.to_dict()))
    assert [(line["ratio"], line["met"]) for line in data["lines"]] == [(0.5, None), (0.5, None)]
    assert data["no_record_because"] == ["2 of 3 seeds", "others used up to 40% of this computer"]
    assert "no record: 2 of 3 seeds; others used up to 40%" in found.text()
    assert "met" not in found.text()


def test_where_a_ratio_is_missed_the_table_says_who_computed() -> None:
    """Of two cores' seconds of our training: a half, an eighth, and three eighths of nobody."""
    found = compared(10, 2.0, 2.0, busy=[0.01, 0.01])
    assert [(line.ratio, line.met) for line in found.lines] == [(1.0, False), (1.0, False)]
    rows = [line.split("  ") for line in found.text().splitlines()]
    shares = {row[0]: row[-1].strip() for row in rows if row[-1].endswith("%")}
    assert shares == {"trainer": "50.0%", "others, and unseen": "12.5%", "nobody": "37.5%"}


def test_trls_program_gets_nothing_of_our_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setenv("VIRTUAL_ENV", "/elsewhere")
    given = trl_side.environ()
    assert "VIRTUAL_ENV" not in given and given["HF_HUB_OFFLINE"] == "1"
    assert given["PYTHONPATH"] == str(Path(slipway_side.__file__).parent / "programs"), (
        "what both sides' programs share, and nothing else"
    )
