"""Several processes that train one policy: they must hold the same one, and know who failed."""

from __future__ import annotations

import functools
import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from runtime.recipes import grpo_lora
from runtime.shared.batch import Batch, BatchError, read_batch, step_folder
from runtime.shared.runtime_config import RuntimeConfig
from runtime.trainer.ranks import RankLostError, Ranks, RanksDifferError
from runtime.trainer.update import update
from tests.runtime import recipe_here
from tests.runtime.rank_processes import run_ranks
from tests.runtime.trainer_fixtures import SETTINGS, make_batch, random_samples, trained_policy

pytestmark = pytest.mark.slow

# Ranks that do not agree wait for each other, and are ended by it.
_DISAGREEING_SECONDS = 60.0


def test_c56_ranks_that_hold_different_masters_are_found_at_the_step(tmp_path: Path) -> None:
    run_ranks(2, functools.partial(step_twice, tmp_path))
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["equal, differ"] * 2


def step_twice(folder: Path, ranks: Ranks) -> None:
    """The second time one entry of one rank is another."""
    policy, said = trained_policy(), []
    optimizer = torch.optim.AdamW(policy.master_weights.values(), lr=1e-4)
    for step in (1, 2):
        try:
            update(policy, optimizer, make_batch(random_samples(56), step=step), SETTINGS, ranks)
            said.append("equal")
        except RanksDifferError:
            said.append("differ")
        if not ranks.is_rank_zero:
            with torch.no_grad():
                list(policy.master_weights.values())[-1][0, 0] += 1e-3
    (folder / str(ranks.rank)).write_text(", ".join(said))


def test_the_probe_is_computed_by_the_first_rank_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody reads another rank's, and it costs as much as the first's."""
    asked: list[int] = []
    batch = make_batch(random_samples(1), step=1)
    with recipe_here.set_up(recipe_here.configured(tmp_path)) as recipe:
        monkeypatch.setattr(grpo_lora, "update", lambda *_: None)
        monkeypatch.setattr(grpo_lora, "compute_probe_logprobs", lambda *_: asked.append(recipe.ranks.rank))
        for rank in (0, 1):
            monkeypatch.setattr(recipe, "ranks", replace(recipe.ranks, rank=rank, size=2))
            recipe._update(batch)
        monkeypatch.undo()
    assert asked == [0]


def test_g19_a_rank_that_is_gone_is_told_from_a_step_that_fails(tmp_path: Path) -> None:
    run_ranks(2, functools.partial(lose_one, tmp_path))
    assert (tmp_path / "said").read_text() == "lost"


def lose_one(folder: Path, ranks: Ranks) -> None:
    if not ranks.is_rank_zero:
        os._exit(0)
    try:
        ranks.all_reduce_sum([torch.ones(3)])
    except RankLostError:
        (folder / "said").write_text("lost")
    os._exit(0)


def test_g19_a_batch_that_another_rank_than_the_first_refuses_is_trained_by_none(tmp_path: Path) -> None:
    """As where it reads a torn file: the others would wait for its part of the gradient."""
    config = recipe_here.configured(tmp_path)
    recipe_here.give(config, *(make_batch(random_samples(step), step=step) for step in (1, 2, 3)))
    run_ranks(2, functools.partial(refuse_one, config), _DISAGREEING_SECONDS)
    failed = json.loads((step_folder(tmp_path / "steps", 2) / "failed.json").read_text())
    assert failed["error"] == "BatchError: torn, as rank 1 reads it"
    assert list(recipe_here.measured(tmp_path)) == [1, 3]


def refuse_one(config: RuntimeConfig, ranks: Ranks) -> None:
    """The recipe, in a process that has joined the others; what it changes here goes with the process."""

    def read(folder: Path) -> Batch:
        batch = read_batch(folder)
        if batch.step == 2 and not ranks.is_rank_zero:
            raise BatchError("torn, as rank 1 reads it")
        return batch

    grpo_lora.read_batch = read
    grpo_lora.Ranks = SimpleNamespace(join=lambda _: ranks)
    with recipe_here.set_up(config) as recipe:
        recipe.train()
