"""When an engine is believed about what an older version sampled, and when the trainer computes it (C51)."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from runtime.shared.batch import Batch
from runtime.trainer.behavior_logprobs import BehaviorLogprobReuse
from runtime.trainer.forward import sequences
from runtime.trainer.old_logprobs import PolicyHistory, old_logprobs
from runtime.trainer.packing import Pack, pack
from runtime.trainer.policy import Policy
from runtime.trainer.ranks import Ranks
from runtime.trainer.update import update
from tests.runtime.rank_processes import run_ranks
from tests.runtime.test_ratios import packs_of, said_by
from tests.runtime.trainer_fixtures import (
    ALONE,
    SETTINGS,
    assert_same_gradient,
    by_whether_asked,
    make_batch,
    measure,
    random_samples,
    settings_of,
    trained_policy,
)

WITHIN = 2e-4


def moved_on(dtype: str, folder: Path) -> tuple[Policy, Policy]:
    """A version, kept in the folder, and what a step made of it."""
    older, now = trained_policy(dtype), trained_policy(dtype)
    older.export_adapter(folder, "tiny")
    optimizer = torch.optim.AdamW(now.master_weights.values(), lr=1e-2)
    update(now, optimizer, make_batch(random_samples(1)), SETTINGS, ALONE)
    return older, now


@pytest.mark.parametrize("step", [3, 4])
@pytest.mark.parametrize(
    ("dtype", "apart", "trusts"),
    [("float32", 1e-4, True), ("float32", 3e-4, False), ("float32", np.nan, False), ("bfloat16", 0.0, False)],
    ids=["as exact as the trainer", "a token that is further off", "a token that is none", "bf16"],
)
def test_c51_the_engines_word_is_taken_where_it_was_exact_on_another_group_of_the_version(
    dtype: str, apart: float, trusts: bool, step: int, tmp_path: Path
) -> None:
    older, now = moved_on(dtype, tmp_path)
    batch = make_batch(random_samples(51, groups=4, members=3), step=step)
    asked, others = by_whether_asked(batch)
    own = said_by(older, batch).numpy()
    said = own.copy()
    span = batch.span(asked[-1])
    said[span.start + int(batch.sampled[span].argmax())] += apart
    batch = replace(batch, version=np.full(12, 2), logprobs=said)
    laid_out: list[list[int]] = []

    def stage(rows: list[int]) -> list[Pack]:
        laid_out.append(rows)
        return pack(sequences(batch), rows, 4096)

    trust = BehaviorLogprobReuse.of(now, settings_of("grpo"), range(12), ALONE)
    found = old_logprobs(now, batch, packs_of(batch), PolicyHistory(3, {2: tmp_path}.get), stage, trust)
    theirs_N = torch.from_numpy(batch.sampled).bool()
    torch.testing.assert_close(found.logprob_N[theirs_N], torch.from_numpy(own)[theirs_N], rtol=0, atol=1e-5)
    expected = {True: [asked], False: [asked, others]}[trusts] if dtype == "float32" else [[*range(12)]]
    assert laid_out == expected
    told = sum(int(batch.sampled[batch.span(one)].sum()) for one in others)
    assert found.reused_tokens == (told if trusts else 0)


@pytest.mark.parametrize(
    ("logprob", "tokens", "holds"),
    [(-1.0, 16, True), (-1.0, 15, False), (-0.01, 500, False), (np.nan, 500, False)],
    ids=["enough", "too few", "nearly certain tokens", "none that is a number"],
)
def test_c51_a_group_that_shows_nothing_vouches_for_nothing(logprob: float, tokens: int, holds: bool) -> None:
    """What is nearly certain is so to anybody, also to an engine that is far off on all else."""
    said_N = torch.full((tokens,), logprob)
    assert (
        BehaviorLogprobReuse(WITHIN, [], ALONE).engine_is_exact(
            said_N, said_N.clone(), torch.ones(tokens).bool()
        )
        is holds
    )


def test_c51_a_narrow_clip_never_takes_the_engines_word() -> None:
    """Between two kernels in fp32 lies as much as gspo's clip sees."""
    policy = trained_policy()
    assert settings_of("grpo").negligible_difference == pytest.approx(WITHIN)
    assert settings_of("gspo").negligible_difference == 0
    assert BehaviorLogprobReuse.of(policy, settings_of("gspo"), [0], ALONE) is None
    assert BehaviorLogprobReuse.of(policy, settings_of("grpo", clip_low=0.04), [0], ALONE) is None
    assert BehaviorLogprobReuse.of(policy, settings_of("grpo"), [0], ALONE) is not None


# ------------------------------------------------------------------ several ranks


def one_rank(folder: Path, ranks: Ranks) -> None:
    found = measure(
        trained_policy(),
        off_in_two_groups(folder),
        SETTINGS.model_copy(update={"pack_tokens": 64}),
        ranks,
        of_version_2(folder),
    )
    torch.save((found.gradient, found.metrics), folder / f"{ranks.rank}.pt")


def of_version_2(folder: Path) -> PolicyHistory:
    return PolicyHistory(3, lambda _: folder)


def off_in_two_groups(folder: Path) -> Batch:
    """One of them is asked about; each rank has groups of its own."""
    batch = make_batch(random_samples(51, groups=8, members=3), step=3)
    said = torch.load(folder / "said.pt", weights_only=False)
    for sequence in np.flatnonzero(np.isin(batch.group[batch.member], [3, 5])):
        said[batch.span(sequence)] += 0.3
    return replace(
        batch, version=np.full(24, 2), logprobs=np.where(batch.sampled, said, 0).astype(np.float32)
    )


@pytest.mark.process
def test_c15_c51_ranks_come_to_one_answer_about_an_engine(tmp_path: Path) -> None:
    policy = trained_policy()
    policy.export_adapter(tmp_path, "tiny")
    said = said_by(policy, make_batch(random_samples(51, groups=8, members=3))).numpy()
    torch.save(said, tmp_path / "said.pt")
    batch = off_in_two_groups(tmp_path)
    whole = measure(policy, batch, SETTINGS, past=of_version_2(tmp_path))
    run_ranks(2, functools.partial(one_rank, tmp_path))
    for rank in range(2):
        gradient, metrics = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        assert_same_gradient(gradient, whole.gradient)
        assert metrics == pytest.approx(whole.metrics, rel=1e-5, abs=1e-6)
    assert whole.metrics["trusted_tokens"] == 0
    exact = replace(batch, meta=batch.meta | {"step": 4})
    assert measure(policy, exact, SETTINGS, past=of_version_2(tmp_path)).metrics["trusted_tokens"] > 0
