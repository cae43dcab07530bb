"""compile_records.py, report.py: what several programs train on one endpoint is several streams."""

from __future__ import annotations

import json
from pathlib import Path

import dspy

from launcher.client import GRPO
from launcher.results import compile_records
from tests.support import abuses as a
from tests.support.small_run import SmallRun


def train(steps: int, seed: int = 0) -> GRPO:
    grpo = GRPO(
        lambda example, prediction, trace=None: float(len(example.english)),
        num_train_steps=steps,
        num_dspy_examples_per_grpo_step=1,
        num_rollouts_per_grpo_step=2,
        num_steps_for_val=1,
        seed=seed,
    )
    words = [dspy.Example(english=word, french="mot").with_inputs("english") for word in ("a", "word")]
    grpo.compile(a.predict(), trainset=words, valset=words)
    return grpo


def test_g22_each_line_at_home_says_which_compile_it_is_of(run: SmallRun, tmp_path: Path) -> None:
    first, second = train(2), train(3, seed=1)
    lines = [json.loads(line) for line in (tmp_path / "grpo.jsonl").read_text().splitlines()]
    ids = [first.summary["compile"], second.summary["compile"]]
    assert len(set(ids)) == 2
    for name, grpo in zip(ids, (first, second), strict=True):
        of_one = [line["kind"] for line in lines if line.get("compile") == name]
        assert of_one == ["compile", *(it["kind"] for it in grpo.history)]
    assert [line["compile"] for line in lines] == sorted((it["compile"] for it in lines), key=ids.index)

    by_compile = compile_records.of_run(tmp_path)
    assert [(one.id, one.done, one.steps) for one in by_compile] == [(ids[0], 2, 2), (ids[1], 3, 3)]
    assert by_compile[0].metric == "train.<locals>.<lambda>"
    for one, grpo in zip(by_compile, (first, second), strict=True):
        assert (one.best, one.score) == (grpo.summary["best"], grpo.summary["after"])
        assert f"{one.done} of {one.steps} steps" in one.describe()


def test_a_line_that_is_damaged_or_of_an_older_launch_is_passed_over(tmp_path: Path) -> None:
    whole: dict[str, object] = {"compile": "c", "kind": "step", "step": 4, "reward": None}
    whole |= {"rollout_seconds": 1, "train_seconds": 2}
    lines = ['{"kind": "step"}', "[1]", '{"compile": "c"}', json.dumps(whole), '{"compile": "c", "ki']
    (tmp_path / "grpo.jsonl").write_text("\n".join(lines))
    (one,) = compile_records.of_run(tmp_path)
    assert (one.done, one.seconds, one.reward, one.steps) == (4, 3.0, None, None)
    assert one.describe() == "4 steps in 3 s"
    assert compile_records.of_run(tmp_path / "nowhere") == []
