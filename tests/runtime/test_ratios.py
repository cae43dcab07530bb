"""What a ratio compares with and how far it counts, and what a step that fails leaves (C49 to C51)."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from runtime.recipes import grpo_lora
from runtime.recipes.command import trainer_command
from runtime.shared import json_files
from runtime.shared.batch import Batch
from runtime.shared.checkpoint import SERVING, checkpoint_name
from runtime.shared.runtime_config import RuntimeConfig
from runtime.shared.step_settings import UpdateSettings
from runtime.shared.train_config import LOSSES, TrainConfig
from runtime.trainer import losses
from runtime.trainer.forward import pack_logprobs, sequences
from runtime.trainer.old_logprobs import OldLogprobs, PolicyHistory, old_logprobs
from runtime.trainer.packing import Pack, pack
from runtime.trainer.policy import Policy
from runtime.trainer.update import update
from tests.runtime import loss_oracles as oracles
from tests.runtime import recipe_here
from tests.runtime.trainer_fixtures import (
    ALONE,
    SETTINGS,
    Sample,
    TablePolicy,
    assert_same_gradient,
    by_whether_asked,
    make_batch,
    measure,
    of_engine,
    random_samples,
    settings_of,
    stale_batch,
    table,
    trained_policy,
)

DTYPES = ["float32", "bfloat16"]
# Of a thousand tokens one is so far from the policy, in nats, where a bound must hold.
FAR = [6.0, 10.0, 200.0]


def packs_of(batch: Batch) -> list[Pack]:
    return pack(sequences(batch), range(batch.sequences), 4096)


@torch.no_grad()
def said_by(policy: Policy, batch: Batch) -> Tensor:
    """What a policy makes of the batch's sampled tokens [N]."""
    found_N = torch.zeros(len(batch.tokens))
    for one in packs_of(batch):
        found_N[one.source_T] = pack_logprobs(policy, one, batch).logprob_T
    return found_N


# ------------------------------------------------------------------ how far a ratio counts


def far_token(nats: float, advantage: float, **given: Any) -> tuple[float, losses.LossTerms]:
    """What the first of a thousand tokens carries of the whole gradient, and the loss's terms."""
    logprob = torch.full((1000,), -2.0, requires_grad=True)
    behaviour = logprob.detach().clone()
    behaviour[0] -= nats
    if given.pop("trainer_agrees", False):
        given["old_T"] = logprob.detach()
    terms = losses.policy_loss(
        logprob, behaviour, torch.full((1000,), advantage), torch.ones(1000), torch.arange(1000) // 10,
        loss=given.pop("loss", "grpo"), clip_low=0.2, clip_high=0.28, dual_clip=SETTINGS.dual_clip,
        mismatch_cap=SETTINGS.mismatch_cap, **given,
    )  # fmt: skip
    terms.loss.backward()
    assert logprob.grad is not None
    return float(logprob.grad[0].abs() / logprob.grad.abs().sum()), terms


@pytest.mark.parametrize("nats", FAR)
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_c50_a_ratio_is_bounded_whatever_the_sign_of_the_advantage(advantage: float, nats: float) -> None:
    share, terms = far_token(nats, advantage)
    assert share < 0.01
    assert (int(terms.masked), int(terms.masked_answers)) == ((1, 1) if advantage < 0 else (0, 0))
    assert int(terms.clipped) == int(advantage > 0)
    assert float(terms.ratio_max) == pytest.approx(math.exp(min(nats, 20)), rel=1e-4)


@pytest.mark.parametrize("nats", FAR)
@pytest.mark.parametrize("loss", ["grpo", "cispo"])
def test_c50_an_engine_far_from_the_trainer_is_truncated(loss: str, nats: float) -> None:
    for advantage in (-1.0, 1.0):
        share, terms = far_token(nats, advantage, trainer_agrees=True, loss=loss)
        assert 0.001 < share < 0.01
        assert (int(terms.truncated), int(terms.masked)) == (1, 0)


@pytest.mark.parametrize("nats", FAR)
@pytest.mark.parametrize("trainer_agrees", [True, False])
def test_c50_the_ratio_of_the_kl_term_is_bounded(trainer_agrees: bool, nats: float) -> None:
    reference = torch.full((1000,), -3.0)
    share, terms = far_token(nats, 0.0, trainer_agrees=trainer_agrees, reference_T=reference, kl_beta=0.1)
    assert 0.001 < share < 0.01
    assert float(terms.kl_reference) < 1000 + 10


def test_c50_what_a_bound_stopped_is_counted_and_the_largest_ratio_shown() -> None:
    logits, batch, rule = table(50), stale_batch(50), settings_of("dapo", overlong="keep")
    metrics = measure(TablePolicy(logits), batch, rule, old=of_engine(batch)).metrics
    trained = oracles.advantages(oracles.answers(logits.double().numpy(), batch), rule)
    ratios = [(np.exp(one.new - one.engine), advantage) for one, advantage in trained]
    past = [int((ratio > rule.dual_clip).sum()) for ratio, advantage in ratios if advantage < 0]
    assert metrics["masked_tokens"] == sum(past) > 0
    assert metrics["masked_sequences"] == sum(count > 0 for count in past)
    assert metrics["ratio_max"] == pytest.approx(max(ratio.max() for ratio, _ in ratios), rel=1e-4)
    assert metrics["mismatch_truncated"] == 0
    beside = measure(TablePolicy(logits), batch, rule).metrics
    counted = sum(int((ratio > rule.mismatch_cap).sum()) for ratio, _ in ratios)
    assert (beside["mismatch_truncated"], beside["masked_tokens"]) == (counted, 0)


# ------------------------------------------------------------------ what it compares with

RULES = {loss: settings_of(loss, overlong="keep") for loss in LOSSES}
RULES |= {
    f"{loss} with a KL term": settings_of(loss, overlong="keep", kl_beta=0.3) for loss in ("grpo", "gspo")
}
RULES["gspo with far bounds"] = settings_of("gspo", overlong="keep", clip_low=0.2, clip_high=0.28)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_c51_beside_the_trainers_own_old_logprobs_the_engines_mismatch_is_a_bounded_weight(
    rule: UpdateSettings,
) -> None:
    logits, batch = table(51), stale_batch(51)
    random = np.random.default_rng(51)
    apart = np.repeat(random.normal(0, 0.9, batch.sequences), np.diff(batch.offsets))
    own = (batch.logprobs + apart + random.normal(0, 0.3, len(batch.tokens))).astype(np.float32)
    found = measure(TablePolicy(logits), batch, rule, old=OldLogprobs(torch.from_numpy(own), 0))
    exact = logits.double().numpy()
    expected = oracles.loss(exact, exact, batch, rule, own)
    assert found.metrics["loss"] == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert found.metrics["mismatch_truncated"] > 0
    gradient = found.gradient["table"].double().numpy()
    directions = np.random.default_rng(1).normal(size=(3, *exact.shape))
    directions[0] = gradient / np.abs(gradient).max()
    for direction in directions:
        up, down = (oracles.loss(exact + step * direction, exact, batch, rule, own) for step in (1e-6, -1e-6))
        assert (gradient * direction).sum() == pytest.approx((up - down) / 2e-6, rel=2e-4, abs=1e-6)


def test_c51_a_narrow_clip_keeps_its_gradient_under_the_noise_of_bf16() -> None:
    """An engine in fp32, a trainer in bf16, one adapter: nothing was learned since, so nothing is clipped."""
    rule = settings_of("gspo", overlong="keep")
    exact, rounded = trained_policy(), trained_policy("bfloat16")
    batch = make_batch(random_samples(51, groups=4, members=4))
    batch = replace(batch, logprobs=said_by(exact, batch).numpy())
    by_engine = measure(rounded, batch, rule, old=of_engine(batch))
    assert by_engine.metrics["clip_fraction"] > 0.2, "no noise to speak of"
    found, expected = measure(rounded, batch, rule), measure(exact, batch, rule)
    assert found.metrics["clip_fraction"] == expected.metrics["clip_fraction"] == 0
    assert_same_gradient(found.gradient, expected.gradient, within=0.1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_c51_what_an_older_version_sampled_is_compared_with_that_version(dtype: str, tmp_path: Path) -> None:
    older, now = trained_policy(dtype), trained_policy(dtype)
    older.export_adapter(tmp_path, "tiny")
    optimizer = torch.optim.AdamW(now.master_weights.values(), lr=1e-2)
    update(now, optimizer, make_batch(random_samples(1)), SETTINGS, ALONE)
    batch = make_batch(random_samples(51, groups=2, members=4))
    batch = replace(batch, version=np.arange(8) % 4)
    before = {name: weight.detach().clone() for name, weight in everything(now).items()}
    laid_out: list[int] = []

    def stage(rows: list[int]) -> list[Pack]:
        laid_out.extend(rows)
        return pack(sequences(batch), rows, 4096)

    found = old_logprobs(now, batch, packs_of(batch), PolicyHistory(3, {2: tmp_path}.get), stage)
    assert laid_out == [0, 4, 2, 6], "only what a version has sampled is computed again under it"
    assert all(torch.equal(weight, before[name]) for name, weight in everything(now).items())
    with now.reference():
        base_N = said_by(now, batch)
    version_N = torch.from_numpy(batch.sampled_by)
    expected = {0: base_N, 1: torch.from_numpy(batch.logprobs), 2: said_by(older, batch)}
    for version, expected_N in expected.items():
        theirs_N = version_N == version
        torch.testing.assert_close(found.logprob_N[theirs_N], expected_N[theirs_N], rtol=0, atol=1e-5)
    assert found.logprob_N[version_N == 3].isnan().all()
    assert found.fallback_tokens == int((version_N == 1).sum()) > 0
    assert not torch.equal(base_N, said_by(now, batch)) and not torch.equal(base_N, expected[2])


def test_c51_the_trainer_compares_each_token_with_the_version_that_sampled_it(tmp_path: Path) -> None:
    """Of the last step's: the newest, one that is kept, the base, and one that is only there as it is pinned.

    A replay has no pins, and must come to the same adapter.
    """
    batches = [make_batch(random_samples(step, groups=2, members=4), step=step) for step in range(1, 6)]
    at_lag_0 = [replace(batch, version=np.full(8, batch.step - 1)) for batch in batches[:4]]
    last = replace(batches[4], version=np.asarray([4, 3, 1, 0] * 2))
    config = recipe_here.configured(tmp_path, {"learning_rate": 5e-2, "keep_checkpoints": 3})
    recipe_here.give(config, *at_lag_0[:2])
    recipe_here.train(config).store.pin(checkpoint_name(1))
    recipe_here.give(config, *at_lag_0[2:], last)
    recipe = recipe_here.train(config)

    now, older = trained_policy(), trained_policy()
    now.import_adapter(recipe.store.load(checkpoint_name(4)).adapter)
    older.import_adapter(recipe.store.load(checkpoint_name(3)).adapter)
    with now.reference():
        base_N = said_by(now, last)
    version_N, old_N = torch.from_numpy(last.sampled_by), torch.full((len(last.tokens),), torch.nan)
    for version, own_N in {0: base_N, 1: torch.from_numpy(last.logprobs), 3: said_by(older, last)}.items():
        old_N[version_N == version] = own_N[version_N == version]
    expected = measure(now, last, recipe.settings, old=OldLogprobs(old_N, 0)).metrics
    found = recipe_here.measured(tmp_path)
    assert found[5]["unkept_tokens"] == int((version_N == 1).sum()) > 0 == found[4]["unkept_tokens"]
    assert found[5]["loss"] == pytest.approx(expected["loss"], rel=1e-4, abs=1e-6)
    assert found[5]["clip_fraction"] == pytest.approx(expected["clip_fraction"])
    kept = measure(
        now, last, recipe.settings, old=OldLogprobs(old_N.where(version_N == 3, torch.nan), 0)
    ).metrics
    assert expected["clip_fraction"] > kept["clip_fraction"] > 0 == found[4]["clip_fraction"]


def test_g20_what_is_served_is_kept_however_far_ahead_the_trainer_is(tmp_path: Path) -> None:
    """An engine that starts anew is given it, while the next is proven and the one after is trained."""
    batches = [make_batch(random_samples(step, groups=2, members=2), step=step) for step in range(1, 6)]
    config = recipe_here.configured(tmp_path, {"keep_checkpoints": 2}, max_staleness=1)
    recipe_here.give(config, *batches[:2])
    recipe_here.train(config)
    json_files.write_json(tmp_path / SERVING, {"version": 1, "step": 1, "name": "policy@v1"})
    recipe_here.give(config, *batches[2:4])
    assert recipe_here.train(config).store.names() == [checkpoint_name(step) for step in (1, 3, 4)]
    json_files.write_json(tmp_path / SERVING, {"version": 4, "step": 4, "name": "policy@v4"})
    recipe_here.give(config, batches[4])
    assert recipe_here.train(config).store.names() == [checkpoint_name(step) for step in (4, 5)]


def everything(policy: Policy) -> dict[str, Tensor]:
    """Masters and working copies."""
    working = {name: weight for name, weight in policy.model.named_parameters() if ".lora_" in name}
    return {f"master {name}": weight for name, weight in policy.master_weights.items()} | working


def test_c51_what_the_policy_itself_sampled_costs_no_second_pass(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    policy, batch = trained_policy(), make_batch(random_samples(51, groups=8, prompt=30))
    policy.export_adapter(tmp_path, "tiny")
    passes: list[int] = []
    hidden = policy.hidden

    def counted(tokens_BL: Tensor, positions_BL: Tensor, mask_BLL: Tensor) -> Tensor:
        passes.append(len(tokens_BL))
        return hidden(tokens_BL, positions_BL, mask_BLL)

    monkeypatch.setattr(policy, "hidden", counted)
    rule = SETTINGS.model_copy(update={"pack_tokens": 64})
    count = len(pack(sequences(batch), range(batch.sequences), 64))
    at_lag_0 = measure(policy, batch, rule, past=PolicyHistory(0, lambda _: tmp_path))
    assert len(passes) == count > 1
    passes.clear()
    at_lag_1 = measure(policy, batch, rule, past=PolicyHistory(1, lambda _: tmp_path))
    asked, others = (len(pack(sequences(batch), rows, 64)) for rows in by_whether_asked(batch))
    assert len(passes) == count + asked + others, "the engine's word is not worth much here"
    assert_same_gradient(at_lag_1.gradient, at_lag_0.gradient, within=1e-6)
    exact = replace(batch, logprobs=said_by(policy, batch).numpy())
    passes.clear()
    found = measure(policy, exact, rule, past=PolicyHistory(1, lambda _: tmp_path))
    assert len(passes) == count + asked < count + asked + others
    assert found.metrics["trusted_tokens"] > 0 == at_lag_1.metrics["trusted_tokens"]
    of_lag_0 = measure(policy, exact, rule, past=PolicyHistory(0, lambda _: tmp_path))
    assert_same_gradient(found.gradient, of_lag_0.gradient, within=1e-5)


def test_each_sampled_token_has_the_version_of_its_turn() -> None:
    batch = make_batch([Sample([([5, 6], False), ([7, 8], True), ([9], False), ([10], True)], 0, 1.0)])
    assert batch.sampled_by.tolist() == [-1, -1, 0, 0, -1, 0]
    turns = [{"start": 2, "end": 4, "version": 3}, {"start": 5, "end": 6, "version": 4}]
    joined = replace(batch, meta=batch.meta | {"samples": [{"turns": turns}]})
    assert joined.sampled_by.tolist() == [-1, -1, 3, 3, -1, 4]


@pytest.mark.parametrize(("given", "staleness", "kept"), [(4, 2, 4), (2, 2, 3), (4, 8, 9)])
def test_c51_the_adapters_of_stale_answers_are_kept_as_long_as_those_are_trained(
    given: int, staleness: int, kept: int
) -> None:
    config = RuntimeConfig(
        run_id="r", model_path="m", state_dir="s", socket_dir="s",
        max_staleness=staleness, train=TrainConfig(keep_checkpoints=given),
    )  # fmt: skip
    assert f"keep_checkpoints={kept}" in trainer_command(config)


# ------------------------------------------------------------------ a step that fails half way


@pytest.mark.parametrize("dtype", DTYPES)
def test_c49_a_backward_that_fails_half_way_leaves_no_gradient(dtype: str) -> None:
    def started() -> tuple[Policy, torch.optim.Optimizer]:
        policy = trained_policy(dtype)
        return policy, torch.optim.AdamW(policy.master_weights.values(), lr=1e-3)

    def full(_: Tensor) -> None:
        raise torch.OutOfMemoryError("no memory left")

    (tried, optimizer), (untouched, other) = started(), started()
    weights = dict(tried.model.named_parameters())
    # The last layer has its gradient by then.
    hook = next(
        weights[name] for name in weights if "layers.0." in name and ".lora_b." in name
    ).register_hook(full)
    with pytest.raises(torch.OutOfMemoryError):
        update(tried, optimizer, make_batch(random_samples(48)), SETTINGS, ALONE)
    hook.remove()
    assert any(weight.grad is not None for weight in weights.values()), (
        "it failed before there was a gradient"
    )
    batch = make_batch(random_samples(49))
    update(tried, optimizer, batch, SETTINGS, ALONE)
    update(untouched, other, batch, SETTINGS, ALONE)
    assert all(
        torch.equal(master, untouched.master_weights[name]) for name, master in tried.master_weights.items()
    )
    assert all(weight.grad is None for weight in everything(tried).values())


def test_c49_a_step_that_fails_gives_back_its_gradients_and_then_the_devices_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = recipe_here.configured(tmp_path)
    recipe_here.give(config, *(make_batch(random_samples(step), step=step) for step in (1, 2)))
    freed: list[bool] = []
    real = grpo_lora.update

    def full(policy: Policy, optimizer: torch.optim.Optimizer, batch: Batch, *more: Any) -> Any:
        if batch.step == 2:
            return real(policy, optimizer, batch, *more)
        for weight in everything(policy).values():
            weight.grad = torch.ones_like(weight)
        raise torch.OutOfMemoryError("no memory left")

    def free() -> None:
        freed.append(all(weight.grad is None for weight in everything(recipe.policy).values()))

    with recipe_here.set_up(config) as recipe:
        monkeypatch.setattr(grpo_lora, "update", full)
        monkeypatch.setattr(recipe, "ranks", replace(recipe.ranks, device="cuda:0"))
        monkeypatch.setattr(torch.cuda, "empty_cache", free)
        recipe.train()
    assert freed == [True]
    assert list(recipe_here.measured(tmp_path)) == [2]
