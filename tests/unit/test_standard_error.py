"""± is one standard error everywhere, and a step's is that of its examples, not of their rollouts."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from statistics import fmean, pstdev, stdev

import numpy as np
import pytest

from launcher.client import standard_error
from launcher.client.dspy.report import Journal
from tests.support.pretend_rollouts import Twice, plain, train
from tests.support.small_run import SmallRun


def test_n02_of_groups_of_one_size_it_is_that_of_the_groups_means() -> None:
    groups = [[0.0, 1.0, 1.0], [0.0, 0.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    means = [fmean(it) for it in groups]
    assert standard_error.of_groups(groups) == pytest.approx(stdev(means) / math.sqrt(len(means)))
    assert standard_error.of_groups([[1.0], [2.0], [4.0]]) == pytest.approx(
        standard_error.of_mean([1.0, 2.0, 4.0])
    )


@pytest.mark.process
def test_n02_of_groups_of_any_size_it_is_how_far_the_mean_strays() -> None:
    """Groups drawn again and again: the mean's own deviation is what is estimated, to a tenth."""
    drawn = np.random.default_rng(7)
    means, errors = [], []
    for _ in range(2000):
        sizes = drawn.integers(1, 9, size=24)
        groups = [list(drawn.normal(drawn.normal(), 0.3, size=int(size))) for size in sizes]
        means.append(fmean(value for it in groups for value in it))
        errors.append(standard_error.of_groups(groups))
    assert fmean(errors) == pytest.approx(pstdev(means), rel=0.1)


def test_n02_one_group_alone_says_nothing_of_it() -> None:
    assert math.isnan(standard_error.of_groups([[0.0, 1.0, 1.0]]))
    assert math.isnan(standard_error.of_groups([[1.0], []]))
    assert math.isnan(standard_error.of_mean([1.0]))


@pytest.mark.process
@pytest.mark.parametrize("per_step", [3, 1])
def test_n02_a_steps_line_has_the_standard_error_of_its_examples(
    run: SmallRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    per_step: int,
) -> None:
    """With two predictors an example has two groups, and is one draw all the same."""
    run.answer = plain
    monkeypatch.setenv("LAUNCH_RUN_DIR", str(tmp_path))
    train(run, Twice(), num_train_steps=1, num_dspy_examples_per_grpo_step=per_step)
    examples: dict[str, list[float]] = {}
    for group in run.requests[1].groups:
        rewards = [it.reward for it in group.members if it.reward is not None]
        examples.setdefault(group.id.split("/")[2], []).extend(rewards)
    wanted = standard_error.of_groups(examples.values())
    lines = [json.loads(line) for line in (tmp_path / "grpo.jsonl").read_text().splitlines()]
    (written,) = (line for line in lines if line["kind"] == "step")
    everything = [value for it in examples.values() for value in it]
    assert len(examples) == per_step and written["spread"] == pytest.approx(pstdev(everything))
    said = re.search(r"step 1/1 · reward ([\d.]+)( ±[\d.]+)? \(", capfd.readouterr().err)
    assert said is not None
    if per_step == 1:
        assert said[2] is None and written["standard_error"] is None
    else:
        assert said[2] == f" ±{wanted:.3f}" and written["standard_error"] == pytest.approx(wanted)


def test_n02_every_line_with_a_plus_minus_is_written_by_one_function() -> None:
    """Whatever says ± of a step or a validation has it from `standard_error`, by that name."""
    source = Path(Journal.step.__code__.co_filename).read_text()
    assert [line.strip() for line in source.splitlines() if "±" in line] == [
        'return f" ±{value:.3f}" if math.isfinite(value) else ""'
    ]
