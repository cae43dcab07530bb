"""What a step measured by lag: its bounds hold at each, and its own figures are made of them (C50, C51)."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from runtime.shared.batch import Batch
from runtime.shared.checkpoint import checkpoint_name
from runtime.shared.train_config import LOSSES
from runtime.trainer import losses
from runtime.trainer.forward import pack_logprobs, sequences
from runtime.trainer.packing import pack
from runtime.trainer.policy import Policy
from runtime.trainer.ranks import Ranks
from tests.runtime import recipe_here
from tests.runtime.rank_processes import run_ranks
from tests.runtime.trainer_fixtures import (
    SETTINGS,
    TablePolicy,
    make_batch,
    measure,
    of_engine,
    random_samples,
    settings_of,
    stale_batch,
    table,
    trained_policy,
)

COUNTED = ("masked_tokens", "masked_sequences", "mismatch_truncated")
MEANS = ("ratio_mean", "clip_fraction", "kl_behaviour")
Figures = dict[int, dict[str, float]]


def by_lag(metrics: dict[str, float]) -> Figures:
    found: Figures = {}
    for name, value in metrics.items():
        if name.startswith("lag"):
            lag, figure = name.removeprefix("lag").split("/")
            found.setdefault(int(lag), {})[figure] = value
    return found


def sampled_at(batch: Batch, step: int, versions: list[int]) -> Batch:
    """The batch as that of a later step, whose sequences these versions have sampled in turn."""
    version = np.resize(np.asarray(versions), batch.sequences)
    return replace(batch, version=version, meta=batch.meta | {"step": step})


# ------------------------------------------------------------------ the bounds


@pytest.mark.parametrize("loss", ["grpo", "dapo"])
def test_c50_at_each_lag_a_ratio_is_bounded_for_both_signs_of_the_advantage(loss: str) -> None:
    """Of 500 tokens of each lag and sign one is far from the policy, the further the older."""
    cells = [(lag, sign) for lag in range(3) for sign in (-1.0, 1.0)]
    lag_T = torch.tensor([lag for lag, _ in cells]).repeat_interleave(500)
    advantage_T = torch.tensor([sign for _, sign in cells]).repeat_interleave(500)
    far = torch.arange(len(cells)) * 500
    nats = torch.tensor([6.0 + 2 * lag for lag, _ in cells])

    def found(**lags: Any) -> tuple[Tensor, losses.LossTerms]:
        logprob = torch.full((3000,), -2.0, requires_grad=True)
        behaviour = logprob.detach().clone()
        behaviour[far] -= nats
        terms = losses.policy_loss(
            logprob, behaviour, advantage_T, torch.ones(3000), torch.arange(3000) // 10, loss=loss,
            clip_low=0.2, clip_high=0.28, dual_clip=SETTINGS.dual_clip, **lags,
        )  # fmt: skip
        terms.loss.backward()
        assert logprob.grad is not None
        return logprob.grad, terms

    gradient, terms = found(lag_T=lag_T, buckets=3)
    for place in far.tolist():
        cell = gradient[place : place + 500].abs()
        assert cell[0] < 0.01 * cell.sum(), cells[place // 500]
    assert terms.masked.tolist() == terms.masked_answers.tolist() == terms.clipped.tolist() == [1, 1, 1]
    assert terms.ratio_max.tolist() == pytest.approx([math.exp(6), math.exp(8), math.exp(10)], rel=1e-4)
    alone, _ = found()
    assert torch.equal(alone, gradient), "a lag changes no loss"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, float], Batch, dict[int, Tensor]]:
    """Two real steps, a third of answers 0 to 2 steps old: what it measured, and what each version says."""
    folder = tmp_path_factory.mktemp("lags")
    config = recipe_here.configured(folder, {"learning_rate": 3e-2, "overlong": "keep"})
    first = [make_batch(random_samples(step, groups=2, members=4), step=step) for step in (1, 2)]
    recipe_here.give(config, *(sampled_at(batch, batch.step, [batch.step - 1]) for batch in first))
    store = recipe_here.train(config).store
    batch = sampled_at(make_batch(random_samples(50, groups=4, members=6)), 3, [2, 1, 0])
    policy = trained_policy()
    with policy.reference():
        said = {0: said_by(policy, batch)}
    for version in (1, 2):
        policy.import_adapter(store.load(checkpoint_name(version)).adapter)
        said[version] = said_by(policy, batch)
    # An engine near each version, but for one token of each sequence that it found less likely.
    noise_N = np.random.default_rng(3).normal(0, 0.02, len(batch.tokens))
    noise_N[batch.offsets[1:] - 2] -= 1.5
    own_N = sum(np.where(batch.sampled_by == version, it.numpy(), 0) for version, it in said.items())
    batch = replace(batch, logprobs=((own_N + noise_N) * batch.sampled).astype(np.float32))
    recipe_here.give(config, batch)
    recipe_here.train(config)
    return recipe_here.measured(folder)[3], batch, said


@torch.no_grad()
def said_by(policy: Policy, batch: Batch) -> Tensor:
    """What a policy makes of the batch's sampled tokens [N]."""
    found_N = torch.zeros(len(batch.tokens))
    for one in pack(sequences(batch), range(batch.sequences), 4096):
        found_N[one.source_T] = pack_logprobs(policy, one, batch).logprob_T
    return found_N


def test_c51_at_each_lag_the_clip_compares_with_the_version_that_sampled(
    trained: tuple[dict[str, float], Batch, dict[int, Tensor]],
) -> None:
    """Each lag's figures as numpy has them, of the logprobs of the version that sampled and of the newest."""
    metrics, batch, said = trained
    found = by_lag(metrics)
    assert sorted(found) == [0, 1, 2]
    member_N = np.repeat(batch.member, np.diff(batch.offsets))
    mean = np.asarray([batch.reward[batch.group == group].mean() for group in batch.group])
    advantage_N = (batch.reward - mean)[member_N]
    for lag, figures in found.items():
        here = batch.sampled_by == 2 - lag
        new, old, engine, advantage = (
            it[here].astype(float)
            for it in (said[2].numpy(), said[2 - lag].numpy(), batch.logprobs, advantage_N)
        )
        ratio = np.exp(new - old)
        masked = (ratio > 3) & (advantage < 0)
        clipped = np.where(advantage > 0, ratio > 1.28, ratio < 0.8)
        expected = {
            "trained_tokens": here.sum(),
            "trained_sequences": len(np.unique(member_N[here])),
            "ratio_mean": np.exp(new - engine).mean(),
            "ratio_max": np.exp(new - engine).max(),
            "clip_fraction": clipped.mean(),
            "masked_tokens": masked.sum(),
            "masked_sequences": len(np.unique(member_N[here][masked])),
            "mismatch_truncated": (np.exp(old - engine) > 2).sum(),
            "kl_behaviour": (np.exp(new - engine) - (new - engine) - 1).mean(),
        }
        assert figures == pytest.approx(expected, rel=1e-3, abs=1e-5), lag
        assert figures["mismatch_truncated"] == figures["trained_sequences"] == 8
    stopped = [found[lag]["clip_fraction"] + found[lag]["masked_tokens"] for lag in (0, 1, 2)]
    assert stopped[0] == 0 < stopped[1] < stopped[2], "what was learned since grows with the lag"
    assert found[2]["masked_tokens"] > 0


# ------------------------------------------------------------------ the step's figures are the lags'


def assert_made_of(metrics: dict[str, float]) -> Figures:
    """Whole-step counts are the sums of the lags', means their means by tokens, the largest the largest."""
    found = by_lag(metrics)
    tokens = {lag: it["trained_tokens"] for lag, it in found.items()}
    for name in COUNTED:
        assert metrics[name] == sum(it[name] for it in found.values()), name
    for name in MEANS:
        mean = sum(it[name] * tokens[lag] for lag, it in found.items()) / sum(tokens.values())
        assert metrics[name] == pytest.approx(mean, rel=1e-12), name
    assert metrics["ratio_max"] == max(it["ratio_max"] for it in found.values())
    return found


def test_c50_a_real_steps_figures_are_made_of_its_lags(
    trained: tuple[dict[str, float], Batch, dict[int, Tensor]],
) -> None:
    metrics, _, _ = trained
    found = assert_made_of(metrics)
    assert metrics["trained_tokens"] == sum(it["trained_tokens"] for it in found.values())


@pytest.mark.parametrize("loss", LOSSES)
def test_c50_whatever_the_loss_a_steps_figures_are_made_of_its_lags(loss: str) -> None:
    batch = sampled_at(stale_batch(50), 5, [4, 3, 2])
    rule = settings_of(loss, overlong="keep")
    for old in (of_engine(batch), None):
        metrics = measure(TablePolicy(table(50)), batch, rule, old=old).metrics
        found = assert_made_of(metrics)
        assert sorted(found) == [0, 1, 2]
        assert (metrics["clip_fraction"] > 0) == (old is not None), "some of it is not nothing"


def turns_of(batch: Batch, row: int, versions: list[int]) -> dict[str, Any]:
    """A sequence as one of joined turns, each piece that was sampled being one."""
    edges = np.flatnonzero(np.diff(batch.sampled[batch.span(row)].astype(int), prepend=0, append=0))
    spans = zip(edges[::2].tolist(), edges[1::2].tolist(), versions, strict=True)
    return {"turns": [{"start": start, "end": end, "version": version} for start, end, version in spans]}


def test_c50_joined_turns_count_each_at_its_own_lag() -> None:
    samples = random_samples(7, groups=2, members=4, turns=2)
    batch = replace(make_batch(samples), version=np.full(8, 3))
    described = [turns_of(batch, row, [3, 3 + row % 3]) for row in range(8)]
    batch = replace(batch, meta=batch.meta | {"step": 6, "samples": described})
    found = assert_made_of(measure(TablePolicy(table(7)), batch, old=of_engine(batch)).metrics)
    # Rows 0, 3 and 6 have two turns of version 3; of eight rows every first turn is of it.
    assert {lag: it["trained_sequences"] for lag, it in found.items()} == {0: 2, 1: 3, 2: 11}
    first, last = samples[2].pieces[1][0], [*samples[2].pieces[3][0], *samples[2].pieces[4][0]]
    newest = [row for row in range(8) if row % 3 == 2]
    assert (batch.staleness[batch.span(2)] == 2).sum() == len(first)
    assert (batch.staleness[batch.span(2)] == 0).sum() == len(last)
    assert found[0]["trained_tokens"] == sum((batch.staleness[batch.span(row)] == 0).sum() for row in newest)


def test_a_step_that_nothing_old_is_in_has_no_figures_but_its_own() -> None:
    batch = sampled_at(stale_batch(50), 5, [4])
    assert by_lag(measure(TablePolicy(table(50)), batch).metrics) == {}
    assert sorted(by_lag(measure(TablePolicy(table(50)), sampled_at(batch, 5, [3])).metrics)) == [1]


def test_a_lag_is_the_gateways_word_and_without_it_of_the_versions_numbers() -> None:
    batch = sampled_at(make_batch(random_samples(1)), 6, [5, 3, 9])
    told = replace(batch, meta=batch.meta | {"lags": {"5": 0, "3": 1}})
    for one, expected in ((batch, [0, 2, 0]), (told, [0, 1, 0])):
        lags = [set(one.staleness[one.span(row)].tolist()) for row in range(3)]
        assert lags == [{-1, lag} for lag in expected]


# ------------------------------------------------------------------ several ranks


def one_rank(folder: Path, ranks: Ranks) -> None:
    measured = measure(
        trained_policy(), several_packs(), SETTINGS.model_copy(update={"pack_tokens": 64}), ranks
    )
    torch.save(measured.metrics, folder / f"{ranks.rank}.pt")


def several_packs() -> Batch:
    batch = make_batch(random_samples(15, groups=6, members=3))
    return sampled_at(batch, 5, [4, 3, 2])


@pytest.mark.process
def test_c50_several_ranks_add_up_what_each_measured_at_a_lag(tmp_path: Path) -> None:
    run_ranks(2, functools.partial(one_rank, tmp_path))
    whole = measure(trained_policy(), several_packs(), SETTINGS).metrics
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert_made_of(found)
        assert found == pytest.approx(whole, rel=1e-5, abs=1e-6)
    assert sorted(by_lag(whole)) == [0, 1, 2]
