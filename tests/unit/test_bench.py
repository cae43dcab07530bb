"""`launch bench`: both sides are told the same, what they left is read rightly, what cannot be is refused."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import dspy
import pytest

from examples import quickstart
from launcher.asking import runtime_config
from launcher.base.errors import JobFailed, PreflightError
from launcher.base.home import Home
from launcher.bench import our_side, trl_environment, trl_side
from launcher.bench.bench_report import Compared
from launcher.bench.child import Lived
from launcher.bench.cpu_seconds import ALL
from launcher.bench.remarks import no_record_because
from launcher.bench.runs import looked_after
from launcher.bench.shape import Shape
from launcher.bench.side_by_side import Pair, lines
from launcher.bench.side_run import Log, SideRun, Step, side_run
from launcher.client import GRPO
from launcher.client.staleness import check_staleness
from launcher.machines import environments
from launcher.screen.output import Output
from runtime import bootstrap
from tests.support.typed import Typed

sys.path.insert(0, str(Path(our_side.__file__).parent / "programs"))
import scored_answer

TASK = Shape(steps=2).task(0, Path("model"))


def pins(path: Path) -> dict[str, str]:
    """Name → version of a requirement file."""
    return dict(re.findall(r"^([\w.-]+)==(\S+)", path.read_text(), re.MULTILINE))


# ------------------------------------------------------------------ both sides are told the same


def test_the_task_is_the_quickstarts() -> None:
    train, held_out = quickstart.phrases(240, 0, held_out=False), quickstart.phrases(100, 0, held_out=True)
    assert TASK["train"] == [it.english for it in train]
    assert TASK["held_out"] == [it.english for it in held_out]
    assert not set(TASK["train"]) & set(TASK["held_out"])


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
    assert scored_answer.french_of(answer) == found


def test_an_answer_is_worth_the_same_on_both_sides() -> None:
    example = dspy.Example(french="")
    for text in ("le chat", "La Fille, à l'été", "sœur", "", "1234"):
        rewarded = quickstart.letters(example, dspy.Prediction(french=text))
        assert rewarded == scored_answer.letters(text)
        assert scored_answer.reward(f"[[ ## french ## ]]\n{text}", cut_off=False) == rewarded
    failure = inspect.signature(GRPO).parameters["format_failure_score"].default
    assert scored_answer.reward("[[ ## french ## ]]\nle chat", cut_off=True) == failure
    assert scored_answer.reward("le chat", cut_off=False) == failure


def test_both_sides_have_the_same_torch_transformers_and_peft() -> None:
    theirs, ours = pins(trl_environment.REQUIREMENTS / "trl.txt"), pins(bootstrap.REQUIREMENTS / "cpu.txt")
    assert {name: theirs[name] for name in ("torch", "transformers", "peft")} == {
        name: ours[name] for name in ("torch", "transformers", "peft")
    }
    asked = pins(trl_environment.REQUIREMENTS / "trl.in")
    assert {name: theirs[name] for name in asked} == asked


# ------------------------------------------------------------------ what is read and judged


def run_of(side: str, seconds: list[float], rewards: list[float]) -> SideRun:
    """A run whose steps took so long and earned so much."""
    ends = [sum(seconds[: at + 1]) for at in range(len(seconds))]
    steps = tuple(Step(end, reward, 0.0, 0.0) for end, reward in zip(ends, rewards, strict=True))
    return SideRun(side, 0, ends[-1], 0.0, 0.0, ends[-1], 0.0, (0.0, 0.0), steps)


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
    assert ours.rewards_over(5) == [3.0]
    assert ours.seconds_to(3.0, 5) == 2.0
    assert ours.median_seconds(Shape(steps=2).first_step) == 1.0


def side_log(path: Path, *entries: dict) -> Log:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return Log(path)


STRETCHES = (
    {"kind": "evaluation", "began": 110.0, "time": 112.0, "score": 11.0},
    {"kind": "training", "began": 113.0, "time": 133.0, "staleness": 1},
    {"kind": "evaluation", "began": 133.0, "time": 136.0, "score": 20.0},
    {"kind": "settings", "time": 137.0, "settings": {"loss": "grpo"}},
)


def test_start_evaluations_training_and_end_are_apart(tmp_path: Path) -> None:
    log = side_log(tmp_path / "side.jsonl", *STRETCHES)
    seen = side_run("ours", 0, Lived(100.0, 140.0), log, [Step(20.0, 1.0, 1.0, 1.0)], tmp_path, 1)
    stretches = (seen.start_seconds, seen.evaluation_seconds, seen.training_seconds, seen.end_seconds)
    assert stretches == (10.0, 5.0, 20.0, 3.0)
    assert (seen.seconds, seen.scores, seen.staleness) == (40.0, (11.0, 20.0), 1)


def test_a_program_that_left_half_a_log_is_said_so(tmp_path: Path) -> None:
    log = side_log(tmp_path / "side.jsonl", *STRETCHES[:2])
    with pytest.raises(JobFailed, match="has not told all"):
        side_run("ours", 0, Lived(100.0, 140.0), log, [], tmp_path)


def test_our_steps_end_when_their_version_is_served(tmp_path: Path) -> None:
    step = {"kind": "step", "reward": 12.0, "rollout_seconds": 1.0, "train_seconds": 0.5}
    told = [{"kind": "compile"}, {**step, "version": 1}, {**step, "version": 2}]
    served = [
        {"version": 0, "outcome": "admitted", "time": 99.0},
        {"version": 1, "outcome": "published", "time": 103.0},
        {"version": 2, "outcome": "refused", "time": 104.0},
        {"version": 2, "outcome": "published", "time": 106.0},
    ]
    committed = [{"version": 1, "time": 102.75}, {"version": 2, "time": 103.5}]
    for name, entries in (("grpo", told), ("publications", served), ("metrics", committed)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(it) + "\n" for it in entries))
    assert [it.ended for it in our_side._steps(tmp_path, 100.0, 2)] == [3.0, 6.0]
    assert our_side._publication_seconds(tmp_path) == [0.25, 2.5]
    with pytest.raises(JobFailed, match="2 of 3 steps"):
        our_side._steps(tmp_path, 100.0, 3)


def compared(steps: int, ours: float, theirs: float, busy: Sequence[float]) -> Compared:
    """A comparison whose steps took so long on two cores, of which others used so much at each seed."""
    computer = {"cores": 2, "processor": "a processor", "memory_gib": 24.0}
    found = Compared(Shape(steps, len(busy)), computer, "folder")
    for seed, others in enumerate(busy):
        pair = []
        for side, seconds in ((our_side.NAME, ours), (trl_side.NAME, theirs)):
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


@pytest.mark.parametrize(("others", "busy"), [(0.1, False), (0.9, True)])
def test_who_comes_to_the_computer_while_a_side_runs_is_seen_too(
    tmp_path: Path, others: float, busy: bool
) -> None:
    """Idle before; then a side computes 20 of 40 seconds, and somebody else a share of all cores'."""
    elsewhere = others * 40.0 * (os.cpu_count() or 1)
    computed = {"training": {"trainer": 20.0, ALL: 20.0 + elsewhere}}
    quiet = dataclasses.replace(run_of("trl", [1.0] * 40, [10.0] * 40), cpu_seconds=computed)
    assert quiet.others_seconds == pytest.approx(elsewhere)
    seen = looked_after("trl", 0, Shape(), lambda *_: quiet, tmp_path, Output(as_json=True))
    assert seen.computer["busy_meanwhile"] == pytest.approx(others, abs=0.001)
    assert json.loads((tmp_path / "trl-0" / "run.json").read_text()) == json.loads(json.dumps(seen.to_dict()))
    only = dataclasses.replace(seen, computer={**seen.computer, "busy_before": 0.0})
    assert any("others used" in why for why in no_record_because(Shape(), [only], 1)) is busy


def test_where_a_ratio_is_missed_the_table_says_who_computed() -> None:
    """Of two cores' seconds of our training: a half, an eighth, and three eighths of nobody."""
    found = compared(10, 2.0, 2.0, busy=[0.01, 0.01])
    assert [(line.ratio, line.met) for line in found.lines] == [(1.0, False), (1.0, False)]
    rows = [line.split("  ") for line in found.text().splitlines()]
    shares = {row[0]: row[-1].strip() for row in rows if row[-1].endswith("%")}
    assert shares == {"trainer": "50.0%", "others, and unseen": "12.5%", "nobody": "37.5%"}


# ------------------------------------------------------------------ what cannot be


def test_an_unknown_trainer_is_refused_before_anything_is_done(tmp_path: Path) -> None:
    done = Typed(tmp_path / "project", tmp_path / "home")("bench", "--against", "verl")
    assert done.returncode == 2
    assert "no comparison with verl" in done.stderr and "launch bench --against trl" in done.stderr
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(
    "words", [("--steps", "0"), ("--seeds", "0"), ("--staleness", "-1"), ("--steps", "x")]
)
def test_a_number_that_cannot_be_is_refused(tmp_path: Path, words: tuple[str, str]) -> None:
    done = Typed(tmp_path / "project", tmp_path / "home")("bench", *words)
    assert done.returncode == 2
    assert words[0] in done.stderr and "launch bench --help" in done.stderr


def test_a_disk_too_full_for_trls_environment_is_3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl_environment, "NEEDED_BYTES", 10**18)
    with pytest.raises(PreflightError) as refused:
        trl_environment.check(Home.find({"LAUNCH_HOME": str(tmp_path)}))
    assert refused.value.exit_code == 3
    assert "needs 1000000000.0 GB" in refused.value.message and "are free at" in str(refused.value.why)


def test_without_a_network_trls_environment_is_refused_with_uvs_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real uv, which is told that it is offline and has nothing kept."""
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(PreflightError) as refused:
        trl_environment.check(Home.find({"LAUNCH_HOME": str(tmp_path)}))
    assert refused.value.exit_code == 3
    assert "cannot be downloaded" in refused.value.message and refused.value.why
    assert not list((tmp_path).glob("environments/*"))


def test_gc_keeps_trls_environment_and_offers_an_older_one(tmp_path: Path) -> None:
    current = bootstrap.Environment(tmp_path, trl_environment.VARIANT, (), trl_environment.REQUIREMENTS).name
    older = current[:-12] + "0" * 12
    for name in (current, older):
        (tmp_path / name).mkdir()
        (tmp_path / name / bootstrap.MARKER).write_text("{}")
    assert [path.name for path in environments.outdated(tmp_path)] == [older]


def test_nothing_of_this_user_reaches_our_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAUNCH_GPUS", "H100:8")
    given = our_side.environ_of(tmp_path)
    assert {name: value for name, value in given.items() if name.startswith("LAUNCH_")} == {
        "LAUNCH_HOME": str(tmp_path)
    }


def test_our_run_begins_with_the_seeds_adapter_and_trains_what_is_as_old_as_asked() -> None:
    assert our_side.settings_of(Shape().task(2, Path("model")))["train.seed"] == 2
    for staleness in (None, 0, 1, 5):
        told = our_side.settings_of(Shape(staleness=staleness).task(0, Path("model")))
        check_staleness(staleness or 0, told.get("max_staleness", runtime_config.defaults()["max_staleness"]))


def test_trls_program_gets_nothing_of_our_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setenv("VIRTUAL_ENV", "/elsewhere")
    given = trl_side.environ()
    assert not {"PYTHONPATH", "VIRTUAL_ENV"} & set(given) and given["HF_HUB_OFFLINE"] == "1"
