"""Packing and ranks change nothing but rounding: no leak between answers, the same gradient however cut."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from runtime.shared.batch import Batch
from runtime.shared.step_settings import UpdateSettings
from runtime.shared.train_config import LOSSES
from runtime.trainer import losses
from runtime.trainer.packing import Pack, Sequences, pack
from runtime.trainer.ranks import Ranks
from runtime.trainer.update import select
from tests.runtime.rank_processes import run_ranks
from tests.runtime.trainer_fixtures import (
    VOCABULARY,
    Measured,
    assert_same_gradient,
    lone_hidden,
    make_batch,
    measure,
    random_samples,
    reordered,
    settings_of,
    trained_policy,
)


def sequences(batch: Batch) -> Sequences:
    spans = [batch.span(sample) for sample in range(batch.sequences)]
    return Sequences(
        [torch.from_numpy(batch.tokens[span]).long() for span in spans],
        [torch.from_numpy(batch.sampled[span]) for span in spans],
        [span.start for span in spans],
    )


def packs_of(batch: Batch, budget: int, *, fixed_rows: bool = False) -> list[Pack]:
    return pack(sequences(batch), range(batch.sequences), budget, fixed_rows=fixed_rows)


def packed_logprobs(policy, batch: Batch, budget: int, *, fixed_rows: bool = False) -> Tensor:
    """Per token of the batch; 0 where nothing was sampled."""
    found = torch.zeros(len(batch.tokens))
    for one in packs_of(batch, budget, fixed_rows=fixed_rows):
        hidden = policy.hidden(one.tokens_BL, one.positions_BL, one.mask_BLL())
        ones = torch.ones(len(one.target_T))
        logprobs = losses.token_logprobs(hidden[one.row_T, one.place_T], policy.output, one.target_T, ones)
        found = found.index_put((one.source_T,), logprobs.logprob_T)
    return found


def lone_logprobs(policy, batch: Batch) -> Tensor:
    """The same from one forward pass per sample, nothing packed or shared."""
    found = torch.zeros(len(batch.tokens))
    for sample in range(batch.sequences):
        span = batch.span(sample)
        tokens = torch.from_numpy(batch.tokens[span]).long()
        (index,) = torch.from_numpy(batch.sampled[span]).nonzero(as_tuple=True)
        hidden = lone_hidden(policy, tokens)[index - 1]
        ones = torch.ones(len(index))
        logprobs = losses.token_logprobs(hidden, policy.output, tokens[index], ones)
        found = found.index_put((index + span.start,), logprobs.logprob_T)
    return found


def gradients_of(policy, values: Tensor) -> dict[str, Tensor]:
    for master in policy.master_weights.values():
        master.grad = None
    (values * torch.linspace(-1, 1, len(values))).sum().backward()
    policy.collect_gradients()
    return {name: master.grad.clone() for name, master in policy.master_weights.items()}


@pytest.mark.parametrize("budget", [64, 256, 4096])
def test_c41_a_shared_prefix_is_independent_forwards_in_value_and_gradient(budget: int) -> None:
    policy = trained_policy()
    batch = make_batch(random_samples(41, groups=4, members=4, turns=2))
    found, expected = packed_logprobs(policy, batch, budget), lone_logprobs(policy, batch)
    assert torch.equal(found != 0, torch.from_numpy(batch.sampled).bool())
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert_same_gradient(gradients_of(policy, found), gradients_of(policy, expected))


def test_c62_a_tree_that_is_cut_where_its_row_ends_is_trained_as_a_whole_one_is() -> None:
    policy = trained_policy()
    batch = make_batch(random_samples(62, groups=5, members=4, prompt=40, completion=60))
    packs = packs_of(batch, 512, fixed_rows=True)
    trees = sum(int(one.tree_BL.max()) + 1 for one in packs)
    assert trees > 5, "no tree is cut"
    found = packed_logprobs(policy, batch, 512, fixed_rows=True)
    expected = lone_logprobs(policy, batch)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert_same_gradient(gradients_of(policy, found), gradients_of(policy, expected))


# Groups of 8, prompt and answer in tokens, places of a row; places computed before trees were cut, and now.
PLACES = {
    (256, 1024, 4096): (98304, 88064),
    (256, 1024, 8192): (77824, 77824),
    (256, 1024, 16384): (131072, 73728),
    (256, 1024, 32768): (98304, 73728),
    (1500, 100, 4096): (32768, 26624),
    (512, 384, 16384): (32768, 32768),
}


@pytest.mark.parametrize("shape", PLACES, ids=str)
def test_c62_rows_are_filled_to_their_end(shape: tuple[int, int, int]) -> None:
    prompt, answer, budget = shape
    batch = make_batch(random_samples(0, groups=8, members=8, prompt=prompt, completion=answer))
    packs = packs_of(batch, budget, fixed_rows=True)
    assert sum(one.tokens_BL.numel() for one in packs) == PLACES[shape][1] <= PLACES[shape][0]
    sources = torch.cat([one.source_T for one in packs]).sort().values
    assert torch.equal(sources, torch.from_numpy(np.flatnonzero(batch.sampled)))


def test_c41_no_completion_sees_another_and_no_prompt_sees_its_neighbour() -> None:
    policy = trained_policy()
    batch = make_batch(random_samples(42, groups=3, members=3, prompt=8, completion=6))
    with torch.no_grad():
        before = packed_logprobs(policy, batch, 4096)
        for sample in (0, 4, 8):
            start = int(batch.offsets[sample]) + int(batch.sampled[batch.span(sample)].argmax())
            changed = replace(batch, tokens=batch.tokens.copy())
            places = slice(start, int(batch.offsets[sample + 1]))
            changed.tokens[places] = 3 + (changed.tokens[places] + 7) % (VOCABULARY - 3)
            after = packed_logprobs(policy, changed, 4096)
            others = np.ones(len(before), bool)
            others[batch.span(sample)] = False
            assert torch.equal(after[others], before[others])
            assert not torch.equal(after, before)


def test_c41_positions_go_on_from_the_prompt_in_every_branch() -> None:
    batch = make_batch(random_samples(43, groups=3, members=3))
    for one in packs_of(batch, 4096):
        predicting = one.positions_BL[one.row_T, one.place_T]
        own = one.source_T - torch.from_numpy(batch.offsets)[one.sequence_T]
        assert torch.equal(predicting, own - 1)


def test_c42_rows_have_few_distinct_lengths() -> None:
    random = np.random.default_rng(0)
    lengths = {
        one.tokens_BL.shape[1]
        for seed in range(60)
        for one in packs_of(
            make_batch(
                random_samples(
                    seed, prompt=int(random.integers(5, 60)), completion=int(random.integers(4, 20))
                )
            ),
            4096,
        )
    }
    assert len(lengths) <= 3 and all(length % 64 == 0 for length in lengths)


def test_rows_of_like_length_are_packs_of_their_own_where_that_saves_places() -> None:
    long = random_samples(45, groups=4, members=4, prompt=60, completion=48)
    short = random_samples(46, groups=5, members=4, prompt=60, completion=30)
    packs = packs_of(make_batch([*long, *short]), 4096)
    (rows, length), (more_rows, shorter) = (one.tokens_BL.shape for one in packs)
    assert (rows, more_rows) == (4, 5) and length == 320 and shorter < length
    # The budget cuts as well, and a pack has what it holds, in whatever order they come.
    for budget in (320, 640, 1000):
        some = packs_of(make_batch([*short, *long]), budget)
        assert all(one.tokens_BL.numel() <= budget for one in some)
        assert sum(len(one.target_T) for one in some) == sum(len(one.target_T) for one in packs)
    # Where all are alike a pack more would cost more than it saves.
    assert len(packs_of(make_batch(long), 4096)) == 1


def test_every_sampled_token_is_in_one_pack_exactly_and_the_budget_holds() -> None:
    batch = make_batch(random_samples(44, groups=5, members=4))
    for budget in (64, 128, 1024):
        packs = packs_of(batch, budget)
        sources = torch.cat([one.source_T for one in packs]).sort().values
        assert torch.equal(sources, torch.from_numpy(np.flatnonzero(batch.sampled)))
        assert all(one.tokens_BL.numel() <= budget for one in packs)


def big_batch() -> Batch:
    """Eight prompts whose trees each need a row of their own."""
    return make_batch(random_samples(15, groups=8, members=3, prompt=30, completion=6))


BUDGETS = {512: 1, 256: 2, 64: 8}
# Weights and ratios of whole answers are where a cut into packs could show.
RULES = {loss: settings_of(loss, kl_beta=0.05) for loss in LOSSES}
RULES |= {"a token of its answer": settings_of("dapo", normaliser="sequence", overlong="keep")}


def ruled(name: str, budget: int) -> UpdateSettings:
    return RULES[name].model_copy(update={"pack_tokens": budget})


@pytest.mark.parametrize(("budget", "count"), BUDGETS.items())
def test_c15_micro_batches_and_their_order_change_no_gradient(budget: int, count: int) -> None:
    assert_order_changes_nothing("grpo", budget, count)


@pytest.mark.parametrize("name", [name for name in RULES if name != "grpo"])
def test_c15_micro_batches_change_no_gradient_of_any_loss(name: str) -> None:
    assert_order_changes_nothing(name, 64, 8)


def assert_order_changes_nothing(name: str, budget: int, count: int) -> None:
    policy, batch = trained_policy(), big_batch()
    whole = measure(policy, batch, ruled(name, 100_000))
    assert len(packs_of(batch, budget)) == count
    for seed in range(2):
        order = (
            np.random.default_rng(seed).permutation(batch.sequences).tolist()
            if seed
            else range(batch.sequences)
        )
        found = measure(policy, reordered(batch, order), ruled(name, budget))
        assert_same_gradient(found.gradient, whole.gradient)
        assert found.metrics == pytest.approx(whole.metrics, rel=1e-5, abs=1e-6)


# (loss, budget): every cut of one loss, and the finest of the others.
CUTS = [("grpo", budget) for budget in BUDGETS] + [(name, 64) for name in RULES if name != "grpo"]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_c15_ranks_change_no_gradient(size: int, tmp_path: Path) -> None:
    policy, batch = trained_policy(), big_batch()
    run_ranks(size, functools.partial(one_rank, tmp_path))
    for place, (name, _) in enumerate(CUTS):
        whole = measure(policy, batch, ruled(name, 100_000))
        for rank in range(size):
            found = load_measured(tmp_path / f"{place}-{rank}.safetensors")
            assert_same_gradient(found.gradient, whole.gradient)
            assert found.metrics == pytest.approx(whole.metrics, rel=1e-5, abs=1e-6)


def test_c19_no_answer_is_left_out_for_being_long() -> None:
    """Longer than a pack, far from the policy, at the edge of a penalty: each is trained, token by token."""
    samples = random_samples(19, groups=4, members=3, prompt=8, completion=6)
    stretched = [
        replace(one, pieces=[one.pieces[0], (list(np.arange(20 * place + 1) % 90 + 3), True)], logprob=-9.0)
        for place, one in enumerate(samples)
    ]
    batch = make_batch(stretched)
    for settings in (
        settings_of(pack_tokens=64),
        settings_of("gspo", pack_tokens=64),
        settings_of("dapo", overlong="soft", overlong_tokens=64, overlong_buffer=32, pack_tokens=64),
    ):
        selected = select(batch, settings)
        assert selected.sequences == list(range(batch.sequences)) and not selected.learnable.dropped
        assert bool((selected.weight_A > 0).all())
        packs = pack(sequences(batch), selected.sequences, settings.pack_tokens)
        trained = torch.cat([one.source_T for one in packs]).sort().values
        assert torch.equal(trained, torch.from_numpy(np.flatnonzero(batch.sampled)))


def one_rank(folder: Path, ranks: Ranks) -> None:
    for place, (name, budget) in enumerate(CUTS):
        found = measure(trained_policy(), big_batch(), ruled(name, budget), ranks)
        save_measured(folder / f"{place}-{ranks.rank}.safetensors", found)


def save_measured(path: Path, found: Measured) -> None:
    numbers = {
        f"metrics/{name}": torch.tensor(value, dtype=torch.float64) for name, value in found.metrics.items()
    }
    save_file(found.gradient | numbers, path)


def load_measured(path: Path) -> Measured:
    tensors = load_file(path)
    metrics = {
        name.removeprefix("metrics/"): float(value)
        for name, value in tensors.items()
        if name.startswith("metrics/")
    }
    gradient = {name: value for name, value in tensors.items() if not name.startswith("metrics/")}
    return Measured(gradient, metrics)
