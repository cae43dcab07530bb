"""Attention over trees: the block mask of GPUs against the mask of whole rows, and layers computed twice.

The kernels themselves are `tests/gpu`'s; here FlexAttention runs as torch writes it down in plain operations.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import OPTConfig, OPTForCausalLM, StableLmConfig, StableLmForCausalLM

from runtime.shared.architectures import PolicyError
from runtime.shared.fixed_row_lengths import fixed_length
from runtime.trainer import policy as policies
from runtime.trainer.attention import BlockSparseMask, DenseMask
from runtime.trainer.forward import sequences
from runtime.trainer.packing import Pack, pack
from runtime.trainer.update import update
from tests.runtime.trainer_fixtures import (
    ALONE,
    LORA,
    SETTINGS,
    Sample,
    assert_same_gradient,
    make_batch,
    measure,
    random_samples,
    tiny_model,
    trained_policy,
)


@pytest.fixture
def plain_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention without its refusal of a backward pass on a CPU, which its plain operations have."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)


def random_pack(seed: int) -> Pack:
    """A row or a few with trees of all sizes, cut by chance: shared prompts, several turns, padding."""
    random = np.random.default_rng(seed)
    batch = make_batch(
        random_samples(
            seed,
            groups=int(random.integers(2, 7)),
            members=int(random.integers(2, 5)),
            prompt=int(random.integers(4, 40)),
            completion=int(random.integers(4, 24)),
            turns=int(random.integers(1, 3)),
        )
    )
    fixed = bool(random.integers(2))
    packs = pack(sequences(batch), range(batch.sequences), int(random.choice([256, 640])), fixed_rows=fixed)
    return packs[0]


def blocks_of(one: Pack) -> BlockSparseMask:
    return BlockSparseMask(one.tree_BL, one.branch_BL, one.positions_BL)


def pairs(mask: BlockSparseMask, window: int | None, one: Pack) -> Tensor:
    """What a kernel makes of a block mask [B, L, L]: whole blocks as they are, others by the rule inside."""
    found = mask.mask(window)
    rows, length = one.tokens_BL.shape
    size = found.BLOCK_SIZE[0]
    ruled = torch.zeros(rows, length, length, dtype=torch.bool)
    place = torch.arange(length)
    for row in range(rows):
        inside = found.mask_mod(torch.tensor(row), torch.tensor(0), place[:, None], place[None, :])
        for i in range(-(-length // size)):
            here = slice(i * size, (i + 1) * size)
            for count, index, whole in (
                (found.kv_num_blocks, found.kv_indices, False),
                (found.full_kv_num_blocks, found.full_kv_indices, True),
            ):
                for j in index[row, 0, i, : int(count[row, 0, i])].tolist():
                    there = slice(j * size, (j + 1) * size)
                    ruled[row, here, there] = True if whole else inside[here, there]
    return ruled


def test_c41_the_block_mask_is_the_mask_at_every_pair_of_200_random_trees() -> None:
    seen = 0
    for seed in range(200):
        one = random_pack(seed)
        window = (None, 7, 33)[seed % 3]
        whole = DenseMask(one.mask_BLL(), one.positions_BL).mask_BLL(window)
        assert torch.equal(pairs(blocks_of(one), window, one), whole), seed
        seen += int((one.branch_BL.max() > 1) & (one.tree_BL.max() > 0))
    assert seen > 50, "most rows hold one tree or one branch: they show little"


@pytest.mark.parametrize(
    ("window", "softcap", "sinks"),
    [(None, None, False), (5, None, False), (None, 3.0, False), (None, None, True), (9, 3.0, True)],
)
@pytest.mark.usefixtures("plain_operations")
@pytest.mark.parametrize("heads", [4, 6], ids=["a power of two", "not one"])
def test_c41_blocks_give_the_values_and_gradients_of_the_mask(
    window: int | None, softcap: float | None, sinks: bool, heads: int
) -> None:
    for seed in range(3):
        one = random_pack(seed)
        rows, length = one.tokens_BL.shape
        generator = torch.Generator().manual_seed(seed)
        query, key, value = (
            torch.randn(rows, count, length, 16, generator=generator, requires_grad=True)
            for count in (heads, 2, 2)
        )
        sink = torch.randn(heads, generator=generator, requires_grad=True) if sinks else None
        weight = torch.randn(rows, heads, length, 16, generator=generator)
        weight[(one.tree_BL < 0)[:, None, :].expand(rows, heads, length)] = 0  # padding predicts nothing
        found = []
        for way in (DenseMask(one.mask_BLL(), one.positions_BL), blocks_of(one)):
            given = [query, key, value, *([sink] if sink is not None else [])]
            out = way.attend(query, key, value, scale=0.3, window=window, softcap=softcap, sinks_H=sink)
            found.append((out * weight, *torch.autograd.grad((out * weight).sum(), given)))
        for theirs, ours in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_c41_a_model_computes_the_same_over_blocks_as_under_the_mask() -> None:
    policy = trained_policy()
    for seed in (3, 4):
        one = random_pack(seed)
        with torch.no_grad():
            masked = policy.hidden(one.tokens_BL, one.positions_BL, one.mask_BLL())
            blocks = policy.hidden(one.tokens_BL, one.positions_BL, blocks_of(one))
        places = (one.row_T, one.place_T)
        torch.testing.assert_close(blocks[places], masked[places], atol=1e-5, rtol=1e-5)


def test_fixed_rows_have_few_lengths_and_hold_every_sampled_token() -> None:
    lengths = set()
    for seed in range(40):
        batch = make_batch(random_samples(seed, groups=5, prompt=20 + 9 * seed, completion=20))
        packs = pack(sequences(batch), range(batch.sequences), 1024, fixed_rows=True)
        lengths |= {one.tokens_BL.shape for one in packs}
        sources = torch.cat([one.source_T for one in packs]).sort().values
        assert torch.equal(sources, torch.from_numpy(np.flatnonzero(batch.sampled)))
    assert lengths <= {(1, 128 * 2**times) for times in range(4)}
    assert [fixed_length(size, 1024) for size in (1, 128, 129, 1024, 1025)] == [128, 128, 256, 1024, 1280]


def test_past_the_budget_a_row_has_four_lengths_to_each_doubling() -> None:
    """A context of 40,960 is trained in a row of so many places, whatever the pack."""
    assert [fixed_length(40960, budget) for budget in (4096, 8192, 16384, 32768)] == [40960] * 4
    lengths = {fixed_length(needed, 4096) for needed in range(1, 32769, 128)}
    assert len(lengths) == 16 and max(lengths) == 32768
    for needed in range(4097, 70000, 997):
        assert needed <= fixed_length(needed, 4096) <= 1.25 * needed
        assert fixed_length(needed, 1000) % 128 == 0


@pytest.mark.parametrize("fixed", [False, True])
def test_a_sequence_past_the_budget_is_a_pack_by_itself_and_makes_no_other_row_longer(fixed: bool) -> None:
    short = random_samples(7, groups=4, members=3, prompt=40, completion=10)
    long = Sample([(list(range(3, 40)), False), ([5] * 900, True)], group=0, reward=1.0)
    alone = pack(sequences(make_batch(short)), range(12), 256, fixed_rows=fixed)
    with_it = pack(sequences(make_batch([*short, long])), range(13), 256, fixed_rows=fixed)
    assert [one.tokens_BL.shape for one in with_it[:-1]] == [one.tokens_BL.shape for one in alone]
    assert with_it[-1].tokens_BL.shape == ((1, 1024) if fixed else (1, 960))
    assert set(with_it[-1].sequence_T.tolist()) == {12}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_that_are_computed_twice_keep_less_and_train_the_same(dtype: str) -> None:
    batch = make_batch(random_samples(50, groups=6, members=4, turns=2))
    plain, twice = (
        policies.build(tiny_model(), LORA, dtype=dtype, device="cpu", seed=0, recompute=recompute)
        for recompute in (False, True)
    )
    for policy in (plain, twice):
        optimizer = torch.optim.AdamW(policy.master_weights.values(), lr=1e-2)
        for step in range(3):
            update(policy, optimizer, make_batch(random_samples(step)), SETTINGS, ALONE)
    assert all(
        torch.equal(twice.master_weights[name], master) for name, master in plain.master_weights.items()
    )
    assert kept_bytes(twice) < 0.6 * kept_bytes(plain)
    assert_same_gradient(measure(twice, batch).gradient, measure(plain, batch).gradient, within=0)


def test_a_layer_with_dropout_of_its_own_has_none_when_it_is_computed_twice(tmp_path: Path) -> None:
    """An OPT's layers drop out by their own word, where they are in training (C29)."""
    shape = {"vocab_size": 64, "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48}
    config = OPTConfig(**shape, num_hidden_layers=2, num_attention_heads=2, dropout=0.5)
    OPTForCausalLM(config).save_pretrained(tmp_path)
    lora = policies.Lora(rank=2, alpha=2.0, target_modules=("q_proj",))
    tokens, mask = torch.arange(3, 20)[None], torch.ones(1, 17, 17, dtype=torch.bool).tril()
    plain, twice = (
        policies.build(tmp_path, lora, dtype="float32", device="cpu", seed=0, recompute=recompute)
        for recompute in (False, True)
    )
    places = torch.arange(17)[None]
    assert torch.equal(twice.hidden(tokens, places, mask), plain.hidden(tokens, places, mask))


def test_a_model_that_passes_nothing_on_to_its_attention_is_refused_in_words(tmp_path: Path) -> None:
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = StableLmConfig(**shape, num_attention_heads=2, num_key_value_heads=2)
    StableLmForCausalLM(config).save_pretrained(tmp_path)
    policy = policies.build(tmp_path, LORA, dtype="float32", device="cpu", seed=0)
    tokens, mask = torch.arange(3, 8)[None], torch.ones(1, 5, 5, dtype=torch.bool).tril()
    with pytest.raises(PolicyError, match="StableLmAttention is not told what each place sees"):
        policy.hidden(tokens, torch.arange(5)[None], mask)


def kept_bytes(policy: policies.Policy) -> int:
    """What a forward pass keeps for its backward pass, weights aside."""
    batch = make_batch(random_samples(51, groups=4, members=4, prompt=100, completion=30))
    (one,) = pack(sequences(batch), range(batch.sequences), 4096)
    weights = {weight.untyped_storage().data_ptr() for weight in policy.model.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        held = policy.hidden(one.tokens_BL, one.positions_BL, one.mask_BLL())
    assert held.requires_grad
    return sum(kept.values())
