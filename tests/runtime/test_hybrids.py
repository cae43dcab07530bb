"""Models that pass a state along their tokens beside attention: a row holds one sequence, nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from runtime.trainer.forward import sequences
from runtime.trainer.packing import pack
from runtime.trainer.packing_check import check_packing
from runtime.trainer.parity_export import write_parity_check
from runtime.trainer.policy import Lora, PolicyError
from tests.runtime.families import HYBRIDS, family_folder
from tests.runtime.test_families import plain, with_peft
from tests.runtime.trainer_fixtures import (
    fresh_policy,
    make_batch,
    measure,
    random_samples,
    tiny_model,
    trained_policy,
)


@pytest.mark.parametrize("name", HYBRIDS)
def test_c41_what_a_hybrid_is_trained_on_is_what_it_computes_for_each_sequence_alone(
    name: str, tmp_path: Path
) -> None:
    """Packed as a step packs them: logprobs of peft, which sees one sequence at a time, are the trainer's."""
    folder = family_folder(name)
    policy = trained_policy(model=folder)
    policy.export_adapter(tmp_path, "tiny")
    model = with_peft(folder, tmp_path)
    batch = make_batch(random_samples(12, groups=3, members=4, turns=2))
    for sample in range(batch.sequences):
        span = batch.span(sample)
        tokens = torch.from_numpy(batch.tokens[span]).long()
        with torch.no_grad():
            logits = model(tokens[None]).logits[0].float() / float(batch.temperature[sample])
        batch.logprobs[span][1:] = logits[:-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0].numpy()
    batch.logprobs[batch.sampled == 0] = 0
    metrics = measure(policy, batch).metrics
    assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-4)
    assert metrics["kl_behaviour"] < 1e-8
    assert measure(fresh_policy(model=folder), batch).metrics["kl_behaviour"] > 1e-5, (
        "the adapter does nothing"
    )


def test_sequences_alone_have_rows_of_their_own_within_the_budget() -> None:
    batch = make_batch(random_samples(13, groups=4, members=5, prompt=30, completion=20))
    packs = pack(sequences(batch), range(batch.sequences), 512, one_sequence_per_row=True)
    sources = torch.cat([one.source_T for one in packs]).sort().values
    assert torch.equal(sources, torch.from_numpy(np.flatnonzero(batch.sampled)))
    for one in packs:
        assert one.tokens_BL.numel() <= 512
        for row in range(len(one.tokens_BL)):
            assert len(one.sequence_T[one.row_T == row].unique()) == 1
            assert set(one.tree_BL[row].tolist()) <= {0, -1}
    assert sum(len(one.tokens_BL) for one in packs) == batch.sequences
    assert len(packs) < batch.sequences, "several rows make a pack"


@torch.no_grad()
def test_what_stands_before_it_in_a_row_would_change_a_sequence() -> None:
    """Why they stand alone: the same model, one sequence behind another."""
    model = plain(family_folder("falcon-h1"))
    tokens = torch.arange(3, 60)
    alone = model(tokens[None]).logits[0]
    behind = model(torch.cat([tokens.flip(0), tokens])[None]).logits[0, len(tokens) :]
    assert float((alone - behind).abs().max()) > 1e-2


def test_a_linear_layer_that_a_hybrid_does_not_have_is_refused_by_name() -> None:
    with pytest.raises(
        PolicyError, match=r"no layer of the model is called gate_proj; its linear layers are"
    ):
        fresh_policy(
            model=family_folder("granite-hybrid"), lora=Lora(4, 4.0, target_modules=("q_proj", "gate_proj"))
        )


def test_c58_a_model_that_counts_positions_by_itself_gets_no_trial_for_its_rows_are_wrong(
    tmp_path: Path,
) -> None:
    """Right alone, so no engine could tell; a hybrid passes, for its sequences stand alone."""
    spoken = [torch.arange(3, 40), torch.arange(50, 90)]
    for model in (family_folder("qwen3"), family_folder("falcon-h1")):
        check_packing(trained_policy(model=model), spoken, 12)
    policy = trained_policy()
    hidden = policy.hidden
    policy.hidden = lambda tokens, positions, seen: hidden(
        tokens, torch.arange(tokens.shape[1]).expand_as(tokens), seen
    )
    with pytest.raises(PolicyError, match="a packed row is not computed as its sequences are alone"):
        write_parity_check(policy, tmp_path, tiny_model(), "tiny")
