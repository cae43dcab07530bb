"""A program's state agrees with the steps, and what it logs is at home and the run's (B10, B13)."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from launcher.client import Refused, Rewound, Session, Trajectory, TrajectoryGroup
from tests.support.small_run import SmallRun

ASKED = {"role": "user", "content": "Well?"}


def group(name: str = "r") -> TrajectoryGroup:
    """By its rollouts: this run's answers have no names."""
    return TrajectoryGroup([Trajectory(rollout=f"{name}-{place}", reward=float(place)) for place in range(2)])


def answered(reward: float | None, version: int, **metrics: float) -> Trajectory:
    said = {"finish_reason": "stop", "message": {"role": "assistant", "content": "yes"}}
    entry = said | {"slipway": {"sample": f"s{version}:0", "version": version}}
    return Trajectory(messages_and_choices=[ASKED, entry], reward=reward, metrics=dict(metrics))


def pair(name: str = "a") -> TrajectoryGroup:
    """By their answers."""
    one, other = answered(1.0, 0), answered(0.0, 0)
    for place, it in enumerate((one, other)):
        it.messages_and_choices[1]["slipway"]["sample"] = f"{name}:{place}"
    return TrajectoryGroup([one, other])


# ------------------------------------------------------------------ state


def test_b13_the_state_rides_on_the_step_and_another_life_reads_it(run: SmallRun, session: Session) -> None:
    assert session.read_state() == {}
    assert session.merge_state({"at": {"epoch": 1, "row": 5}}) == {"at": {"epoch": 1, "row": 5}}
    assert run.session().read_state() == {}, "no step has it yet"
    session.train([group()], state={"at": {"row": 6}})
    assert run.session().read_state() == session.read_state() == {"at": {"epoch": 1, "row": 6}}
    session.overwrite_state({"new": 1})
    assert session.read_state() == {"new": 1}
    session.train([group("s")])
    assert run.client_state == {"new": 1}
    session.train([group("t")])
    assert run.client_state == {"new": 1}, "a step without a word about it keeps it"


def test_b13_what_is_read_is_a_copy_and_no_state_is_larger_than_a_step_carries(session: Session) -> None:
    session.merge_state({"seen": [1]})
    session.read_state()["seen"].append(2)
    assert session.read_state() == {"seen": [1]}
    with pytest.raises(ValueError, match="at most"):
        session.merge_state({"big": "x" * 70_000})
    assert session.read_state() == {"seen": [1]}


def test_b13_the_same_groups_settings_and_state_are_the_same_step(run: SmallRun, session: Session) -> None:
    first = session.train([pair()], state={"done": 1}, learning_rate=1e-5)
    assert session.train([pair()], state={"done": 1}, learning_rate=1e-5) == first
    assert run.session().train([pair()], state={"done": 1}, learning_rate=1e-5) == first
    assert len(run.steps) == 1
    for other in ({"learning_rate": 2e-5}, {"state": {"done": 2}}):
        session.train([pair()], **({"state": {"done": 1}, "learning_rate": 1e-5} | other))
    session.train([pair("s")], state={"done": 1}, learning_rate=1e-5)
    assert len({request.key for request in run.requests.values()}) == len(run.steps) == 4


def test_b13_a_rollouts_name_that_is_used_again_after_a_step_is_another_step(
    run: SmallRun, session: Session
) -> None:
    """As `task-7-try-2` of each epoch: its answers are other ones, though all that is sent is the same."""
    assert [session.train([group()]).step for _ in range(3)] == [1, 2, 3]
    assert len({request.key for request in run.requests.values()}) == 3


def test_b13_a_step_of_before_that_is_sent_again_moves_no_place(run: SmallRun, session: Session) -> None:
    session.train([pair("a")], state={"done": 1})
    session.train([pair("b")], state={"done": 2})
    assert session.train([pair("a")], state={"done": 1}).step == 1
    again = session.train([pair("c")], state={"done": 2})
    assert (again.step, again.dropped) == (3, {}), "not taken for the second step of another life"


def test_b13_a_lost_machine_takes_the_unsaved_state_with_it(run: SmallRun, session: Session) -> None:
    session.train([group()], state={"done": 1})
    session.train([group("s")], state={"done": 2})
    run.lose_machine(1)
    run.lost = {"t-0"}
    with pytest.raises(Rewound):
        session.train([group("t")], state={"done": 3})
    assert session.read_state() == {"done": 1}


def test_b12_what_the_run_refuses_for_another_reason_is_raised(run: SmallRun, session: Session) -> None:
    run.break_next = ["", 400]  # its place is told, the step is refused
    with pytest.raises(Refused):
        session.train([group()])


# ------------------------------------------------------------------ log


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_b10_a_validation_is_the_runs_score_and_its_texts_are_at_home(
    run: SmallRun, session: Session, tmp_path: Path
) -> None:
    groups = [
        TrajectoryGroup([answered(1.0, 4, moves=3), answered(0.0, 4, moves=5)], metadata={"task": "a"}),
        TrajectoryGroup([answered(1.0, 3), answered(None, 4), ValueError("no")]),
    ]
    done = session.log(groups, metrics={"win rate": 0.75})
    assert done.folder == tmp_path
    (line,) = lines(tmp_path / "history.jsonl")
    assert line == done.line
    assert {name: line[name] for name in line if name != "time"} == {
        "step": 4, "split": "val", "groups": 2, "trajectories": 4, "without_reward": 1,
        "exceptions": {"raised ValueError": 1}, "reward": 0.75, "standard_error": 0.25, "examples": 2,
        "metrics": {"moves": 4.0, "win rate": 0.75}, "val/reward": 0.75,
    }  # fmt: skip
    kept = [TrajectoryGroup(**it) for it in lines(tmp_path / "trajectories" / "val-000004.jsonl")]
    assert [[it.messages() for it in one] for one in kept] == [
        [it.messages() for it in one] for one in groups
    ]
    assert [len(one.exceptions) for one in kept] == [0, 1]
    told = [
        (it.name, it.step, it.version, it.score, it.standard_error, it.examples) for it in run.validations
    ]
    assert told == [("score", 4, 4, 0.75, 0.25, 2), ("win-rate", 4, 4, 0.75, None, None)]


def test_b10_what_is_trained_is_no_validation_and_another_split_has_a_name_of_its_own(
    run: SmallRun, session: Session, tmp_path: Path
) -> None:
    session.log([group()], split="train", step=2)
    assert not run.validations
    session.log([answered(0.5, 1), answered(1.0, 1)], split="test", metrics={"won": 1.0})
    assert [(it.name, it.score) for it in run.validations] == [("test", 0.75), ("test.won", 1.0)]
    assert sorted(it.name for it in (tmp_path / "trajectories").iterdir()) == [
        "test-000001.jsonl", "train-000002.jsonl",
    ]  # fmt: skip
    assert [(it["split"], it["step"]) for it in lines(tmp_path / "history.jsonl")] == [
        ("train", 2),
        ("test", 1),
    ]


def test_b10_metrics_alone_and_what_is_no_number(
    run: SmallRun, session: Session, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    session.log(metrics={"loss": 0.25, "gone": math.nan})
    assert [(it.name, it.step, it.score) for it in run.validations] == [("loss", 0, 0.25)]
    assert "gone of step 0 is nan: no score" in capfd.readouterr().err
    (line,) = lines(tmp_path / "history.jsonl")
    assert (line["reward"], line["metrics"]) == (None, {"loss": 0.25, "gone": None})
    assert not (tmp_path / "trajectories").exists()
    with pytest.raises(ValueError, match="split's name"):
        session.log([], split="../val")


def test_b10_one_trajectory_is_logged_and_a_metric_of_it_that_is_no_number_left_out(
    run: SmallRun, session: Session
) -> None:
    one = answered(0.5, 1, moves=3)
    one.metrics |= {"winner": "x", "length": None}  # type: ignore[dict-item]
    line = session.log(one).line
    assert (line["trajectories"], line["reward"], line["metrics"]) == (1, 0.5, {"moves": 3.0})
    assert [(it.name, it.score) for it in run.validations] == [("score", 0.5)]


def test_b10_the_runs_key_is_in_no_text_at_home(run: SmallRun, session: Session, tmp_path: Path) -> None:
    one = answered(0.5, 1)
    one.logs.append(f"401 for Bearer {session.api_key}")
    session.log(one)
    texts = (tmp_path / "trajectories" / "val-000001.jsonl").read_text()
    assert session.api_key and session.api_key not in texts
    assert "401 for Bearer ***" in texts


def test_b10_one_trajectory_is_no_group_to_train(session: Session) -> None:
    with pytest.raises(TypeError, match="pass TrajectoryGroup"):
        session.train(answered(0.5, 1))  # type: ignore[arg-type]


def test_b10_logged_again_the_newest_texts_are_right_and_no_log_ends_a_training(
    run: SmallRun, session: Session, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    session.log([answered(0.0, 1)])
    session.log([answered(1.0, 1)])
    (kept,) = lines(tmp_path / "trajectories" / "val-000001.jsonl")
    assert kept["trajectories"][0]["reward"] == 1.0
    assert [it["reward"] for it in lines(tmp_path / "history.jsonl")] == [0.0, 1.0]
    run.keeps_validations = False
    (tmp_path / "history.jsonl").unlink()
    (tmp_path / "history.jsonl").mkdir()
    session.log([answered(1.0, 2)])
    said = capfd.readouterr().err
    assert "the run does not keep score of step 2" in said
    assert f"not kept in {tmp_path}" in said
