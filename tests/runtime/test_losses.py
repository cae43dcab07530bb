"""The loss as numbers: what carries it, at which temperature, against an oracle, and what leaves the step."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from runtime.shared.learnable import learnable, overlong_penalty, without_variance
from runtime.shared.step_settings import SettingsError, UpdateSettings
from runtime.shared.train_config import LOSSES, TrainConfig
from runtime.trainer import losses
from runtime.trainer.update import select, update
from tests.runtime import loss_oracles as oracles
from tests.runtime.trainer_fixtures import (
    ALONE,
    EOS,
    SETTINGS,
    VOCABULARY,
    Sample,
    TablePolicy,
    assert_same_gradient,
    make_batch,
    measure,
    of_engine,
    random_samples,
    settings_of,
    stale_batch,
    table,
    trained_policy,
)

OWN = {"loss": "grpo", "clip_low": 0.2, "clip_high": 0.28}
UNIFORM = TablePolicy(torch.zeros(64, VOCABULARY))


def loss_of(logprob: Tensor, behaviour: Tensor, advantage: Tensor, **changes: Any) -> losses.LossTerms:
    """Each token its own sample, of weight 1."""
    weight = changes.pop("weight_T", torch.ones(len(logprob)))
    return losses.policy_loss(
        logprob, behaviour, advantage, weight, torch.arange(len(logprob)), **OWN | changes
    )


@pytest.mark.parametrize("prompts", [[[10, 11, 12, 13]] * 2, [[10, 11, 12, 13], [14, 15, 16, 17]]])
def test_c04_only_sampled_tokens_carry_loss_the_first_one_and_the_eos_included(
    prompts: list[list[int]],
) -> None:
    # A group's advantages add up to 0: what two samples have alike would take back its own gradient.
    observations = [30, 31], [32, 33]
    answers = [[20, 21], [22, 23]], [[40, 41], [42, 43]]
    batch = make_batch(
        [
            Sample(
                [
                    (prompts[who], False),
                    (first, True),
                    (observations[who], False),
                    (second, True),
                    ([EOS + who], True),
                ],
                group=0,
                reward=float(who),
            )
            for who, (first, second) in enumerate(answers)
        ]
    )
    lengths = np.diff(batch.offsets)
    batch.logprobs[:] = -math.log(VOCABULARY)  # of all, so that nothing but the choice leaves any out
    tokens = int(batch.sampled.sum())
    assert tokens == 10 and set(lengths) == {11}
    expected = torch.zeros(64, VOCABULARY)
    one = 0.5 / (0.5 + 1e-4)  # rewards 0 and 1 over their deviation
    for position in range(10):
        for sample, advantage in ((0, -one), (1, one)):
            at = int(batch.offsets[sample]) + position + 1
            if batch.sampled[at]:
                one_hot = torch.zeros(VOCABULARY)
                one_hot[int(batch.tokens[at])] = 1
                expected[position] -= advantage / tokens * (one_hot - 1 / VOCABULARY)
    assert [bool(row.any()) for row in expected[:10]] == [
        False, False, False, True, True, False, False, True, True, True,
    ]  # fmt: skip
    found = measure(UNIFORM, batch).gradient["table"]
    assert torch.equal(found.abs().sum(1) > 0, expected.abs().sum(1) > 0)
    torch.testing.assert_close(found, expected, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_c07_logits_are_divided_by_the_temperature_before_the_log_softmax(temperature: float) -> None:
    logits = table()
    batch = make_batch(
        [
            replace(sample, temperature=temperature)
            for sample in random_samples(7, groups=1, members=4, prompt=12)
        ]
    )
    for sample in range(batch.sequences):
        start = int(batch.offsets[sample])
        for at in range(start, int(batch.offsets[sample + 1])):
            if batch.sampled[at]:
                row = logits[at - start - 1].double().numpy() / temperature
                batch.logprobs[at] = row[batch.tokens[at]] - np.log(np.exp(row).sum())
    metrics = measure(TablePolicy(logits), batch).metrics
    assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-6)
    assert metrics["kl_behaviour"] == pytest.approx(0, abs=1e-9)
    hidden, target = logits[:5], torch.tensor([1, 2, 3, 4, 5])
    found = losses.token_logprobs(hidden, lambda state: state, target, torch.full((5,), temperature))
    expected = torch.distributions.Categorical(logits=hidden / temperature)
    torch.testing.assert_close(found.logprob_T, expected.log_prob(target))
    torch.testing.assert_close(found.entropy_T, expected.entropy())


@pytest.mark.parametrize("odd", [float("nan"), float("-inf")])
def test_c10_a_sample_with_an_unusable_behaviour_logprob_is_dropped_and_counted(odd: float) -> None:
    batch = make_batch(random_samples(10))
    whole = measure(UNIFORM, batch)
    sick = replace(batch, logprobs=batch.logprobs.copy())
    sick.logprobs[sick.offsets[5] - 1] = odd  # the last token of sample 4
    selected = select(sick, SETTINGS)
    assert selected.learnable.dropped == {"logprob not finite": 1}
    assert selected.sequences == [0, 1, 2, 3, 5, 6, 7, 8]
    without = measure(UNIFORM, sick)
    assert all(math.isfinite(value) for value in without.metrics.values())
    assert torch.isfinite(without.gradient["table"]).all()
    assert not torch.equal(without.gradient["table"], whole.gradient["table"])


def test_c11_the_log_softmax_is_in_fp32_whatever_the_logits_are() -> None:
    logits = (table(rows=40) * 6).bfloat16()
    target = torch.arange(40)
    found = losses.token_logprobs(logits, lambda state: state, target, torch.full((40,), 1.3))
    expected = (logits.double() / 1.3).log_softmax(-1).gather(1, target[:, None])[:, 0]
    assert found.logprob_T.dtype == torch.float32
    torch.testing.assert_close(found.logprob_T.double(), expected, atol=1e-5, rtol=1e-6)


def test_c11_chunked_is_dense_in_value_and_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(VOCABULARY, 16, generator=generator)
    target = torch.randint(VOCABULARY, (50,), generator=generator)
    temperature = torch.rand(50, generator=generator) + 0.5
    start = torch.randn(50, 16, generator=generator)

    def value_and_gradients(chunk: int) -> list[torch.Tensor]:
        hidden, matrix = start.clone().requires_grad_(), weight.clone().requires_grad_()
        found = losses.token_logprobs(
            hidden, lambda state: state @ matrix.T, target, temperature, chunk=chunk
        )
        (found.logprob_T * torch.linspace(-1, 1, 50)).sum().backward()
        assert hidden.grad is not None and matrix.grad is not None
        return [found.logprob_T.detach(), found.entropy_T, hidden.grad, matrix.grad]

    for found, expected in zip(value_and_gradients(7), value_and_gradients(1024), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


RULES = {
    "grpo": settings_of("grpo"),
    "grpo with a KL term": settings_of("grpo", kl_beta=0.3, overlong="keep"),
    "grpo of DeepSeekMath": settings_of(
        "grpo", normaliser="sequence", scale_rewards=True, clip_high=0.2, kl_beta=0.04, overlong="keep"
    ),
    "grpo by a constant": settings_of("grpo", normaliser="constant", constant_tokens=33),
    "dr_grpo": settings_of("dr_grpo", overlong="keep", constant_tokens=256),
    "dr_grpo per token": settings_of("dr_grpo", normaliser="token"),
    "dapo": settings_of("dapo"),
    "dapo with a soft penalty": settings_of("dapo", overlong="soft", overlong_tokens=19, overlong_buffer=8),
    "dapo with a KL term": settings_of("dapo", kl_beta=0.3, scale_rewards=False),
    "dapo per sequence": settings_of("dapo", normaliser="sequence"),
    "cispo": settings_of("cispo"),
    "cispo with near bounds": settings_of("cispo", clip_low=0.3, clip_high=0.3, kl_beta=0.1),
    "gspo": settings_of("gspo", overlong="keep"),
    "gspo with far bounds": settings_of("gspo", clip_low=0.2, clip_high=0.28, scale_rewards=False),
    "gspo with a KL term": settings_of("gspo", kl_beta=0.3),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_c16_loss_and_gradient_are_those_of_a_numpy_oracle(rule: UpdateSettings) -> None:
    logits, batch = table(16), stale_batch(16)
    found = measure(TablePolicy(logits), batch, rule, old=of_engine(batch))
    exact = logits.double().numpy()
    assert found.metrics["loss"] == pytest.approx(oracles.loss(exact, exact, batch, rule), rel=1e-5, abs=1e-6)
    assert 0.02 < found.metrics["clip_fraction"] < 0.95 or rule.loss == "cispo"
    gradient = found.gradient["table"].double().numpy()
    assert np.abs(gradient).max() > 1e-4
    directions = np.random.default_rng(1).normal(size=(4, *exact.shape))
    directions[0] = gradient / np.abs(gradient).max()
    for direction in directions:
        up, down = (oracles.loss(exact + step * direction, exact, batch, rule) for step in (1e-6, -1e-6))
        assert (gradient * direction).sum() == pytest.approx((up - down) / 2e-6, rel=2e-4, abs=1e-6)


def test_c16_what_a_token_counts_is_settled_for_the_whole_step() -> None:
    lengths = torch.tensor([1, 3, 4])
    assert losses.token_weights(lengths, "token").tolist() == [0.125] * 3
    per_answer = losses.token_weights(lengths, "sequence")
    torch.testing.assert_close(per_answer * lengths, torch.full((3,), 1 / 3))
    assert losses.token_weights(lengths, "constant", 16).tolist() == pytest.approx([1 / 48] * 3)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"loss": "gspo", "normaliser": "token"}, "normaliser=token does not fit: gspo clips whole answers"),
        ({"loss": "dr_grpo", "scale_rewards": True}, "scale_rewards"),
        ({"loss": "dr_grpo", "normaliser": "sequence"}, "normaliser"),
        ({"loss": "dapo", "constant_tokens": 9}, "constant_tokens"),
        ({"loss": "grpo", "clip_low": 1.5}, "clip_low"),
        ({"clip_high": 2.5, "dual_clip": 3.0}, "dual_clip=3.0 does not fit: it lies inside the clip"),
        ({"loss": "gspo", "dual_clip": 1.0001}, "which ends at 1.0004"),
        ({"overlong": "soft"}, "overlong_tokens"),
        ({"overlong_tokens": 90}, "overlong=soft"),
        ({"overlong": "soft", "overlong_tokens": 9, "overlong_buffer": 9}, "must be less"),
        ({"loss": "ppo"}, "loss=ppo"),
    ],
)
def test_keys_that_mean_nothing_beside_one_another_are_refused(keys: dict, says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        UpdateSettings.of(TrainConfig().model_dump() | keys)


def test_each_loss_has_its_own_values_and_any_can_be_said() -> None:
    own = {loss: settings_of(loss) for loss in LOSSES}
    assert (own["dapo"].normaliser, own["dapo"].scale_rewards, own["dapo"].clip_high) == ("token", True, 0.28)
    assert (own["dr_grpo"].normaliser, own["dr_grpo"].constant_tokens) == ("constant", 1024)
    assert (own["gspo"].normaliser, own["gspo"].clip_high) == ("sequence", 4e-4)
    assert own["grpo"].constant_tokens is None
    assert [loss for loss in LOSSES if not own[loss].scale_rewards] == ["dr_grpo"]
    assert {own[loss].dual_clip for loss in LOSSES} == {3.0}
    said = settings_of("dapo", normaliser="sequence", scale_rewards=False, clip_high=0.3)
    assert (said.normaliser, said.scale_rewards, said.clip_low, said.clip_high) == (
        "sequence", False, 0.2, 0.3,
    )  # fmt: skip


@pytest.mark.parametrize(("loss", "clip_high", "bound"), [("grpo", 2.5, 3.5), ("cispo", 9.0, 3.0)])
def test_c50_a_clip_as_wide_as_older_runs_have_it_moves_the_bound_with_it(
    loss: str, clip_high: float, bound: float
) -> None:
    """They were begun when nothing else was to be said; the trainer is told what it came to, and takes it."""
    found = settings_of(loss, clip_high=clip_high)
    assert (found.clip_high, found.dual_clip) == (clip_high, bound)
    resolved = TrainConfig.model_validate({"loss": loss, "clip_high": clip_high}).resolved()
    assert UpdateSettings.of(TrainConfig().model_dump() | resolved.model_dump()) == found


def test_c17_a_group_without_variance_has_advantage_exactly_zero() -> None:
    reward, group = torch.tensor([0.1, 0.1, 0.1, 0.0, 1.0, 0.7]), torch.tensor([0, 0, 0, 1, 1, 2])
    assert losses.advantages(reward, group).tolist() == [0, 0, 0, -0.5, 0.5, 0]
    flat, groups = without_variance(reward.numpy(), group.numpy())
    assert flat.tolist() == [True, True, True, False, False, True] and groups == 2
    scaled = losses.advantages(reward, group, scale=True)
    one = 0.5 / (0.5 + 1e-4)
    torch.testing.assert_close(scaled, torch.tensor([0, 0, 0, -one, one, 0]))
    assert scaled[torch.from_numpy(flat)].tolist() == [0, 0, 0, 0]


def test_c17_rounding_in_rewards_is_not_made_large_by_the_deviation() -> None:
    reward = torch.tensor([0.3, 0.3, 0.3, 0.3], dtype=torch.float32)
    reward[1] = torch.nextafter(reward[1], torch.tensor(1.0))
    found = losses.advantages(reward, torch.zeros(4, dtype=torch.long), scale=True)
    assert 0 < found.abs().max() < 1e-3


def test_c17_a_reward_that_is_no_number_leaves_the_mean_and_is_never_trained() -> None:
    reward = torch.tensor([0.0, math.nan, 1.0, math.inf, 2.0])
    assert losses.advantages(reward, torch.zeros(5, dtype=torch.long)).tolist() == [-1, 0, 0, 0, 1]
    batch = make_batch(random_samples(17, groups=2, members=3))
    batch.reward[4] = math.nan
    found = learnable(batch, SETTINGS)
    assert found.sequences == [0, 1, 2, 3, 5]
    assert found.dropped == {"reward not finite": 1}


def test_c17_a_dropped_group_leaves_the_denominator() -> None:
    samples = random_samples(18, groups=2)
    flat = [replace(sample, group=2, reward=0.3) for sample in samples[:3]]
    alone = measure(UNIFORM, make_batch(samples))
    assert learnable(make_batch([*samples, *flat]), SETTINGS).dropped == {"no variance in its group": 3}
    beside = measure(UNIFORM, make_batch([*samples, *flat]))
    assert_same_gradient(beside.gradient, alone.gradient, within=1e-6)
    assert beside.metrics["loss"] == pytest.approx(alone.metrics["loss"])


def test_c05_an_answer_cut_off_at_its_limit_is_left_out_or_kept_by_choice() -> None:
    samples = random_samples(5)
    batch = make_batch([replace(samples[0], truncated=True), *samples[1:]])
    assert learnable(batch, SETTINGS).dropped == {"truncated": 1}
    assert len(learnable(batch, settings_of(overlong="keep")).sequences) == len(samples)


def test_c05_what_a_cut_off_answer_earned_does_not_move_the_others() -> None:
    samples = random_samples(5)
    rich = replace(samples[0], truncated=True, reward=1000.0)
    beside = select(make_batch([rich, *samples[1:]]), SETTINGS).advantage_S[1:]
    alone = select(make_batch(samples[1:]), SETTINGS).advantage_S
    assert beside.tolist() == alone.tolist()


def test_c05_a_soft_penalty_charges_the_last_tokens_before_the_limit() -> None:
    lengths = np.array([1, 12, 16, 20, 25])
    assert overlong_penalty(lengths, 20, 8).tolist() == [0, 0, -0.5, -1, -1]
    answers = [[5] * 4, [6] * 16, [7] * 20, [8] * 4]
    batch = make_batch([Sample([([9, 9], False), (ids, True)], 0, 1.0) for ids in answers])
    batch.member[3] = 2  # the third rollout asked twice: its longest answer counts
    found = select(batch, settings_of("dapo", overlong="soft", overlong_tokens=20, overlong_buffer=8))
    assert found.learnable.penalty_M.tolist() == [0, -0.5, -1, 0]
    assert len(found.sequences) == 4 and found.advantage_S[3] == found.advantage_S[2] < 0


def test_c05_the_end_of_an_answer_is_trained_though_it_is_the_padding_token() -> None:
    """0 is what rows are filled up with."""
    ends = [replace(one, pieces=[*one.pieces[:-1], ([0], True)]) for one in random_samples(50, groups=1)]
    batch = make_batch(ends)
    metrics = measure(UNIFORM, batch).metrics
    expected = np.exp(-math.log(VOCABULARY) - batch.logprobs[batch.sampled == 1]).mean()
    assert metrics["ratio_mean"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("advantage", "ratio", "learns"),
    [(1, 1.4, False), (1, 0.5, True), (-1, 1.4, True), (-1, 0.5, False), (1, 1.1, True), (-1, 0.9, True)],
)
def test_c18_the_clip_stops_the_gradient_on_the_side_of_the_advantage(
    advantage: float, ratio: float, learns: bool
) -> None:
    logprob = torch.tensor([-1.0], requires_grad=True)
    behaviour = (logprob.detach() - math.log(ratio)).requires_grad_()
    reference = torch.tensor([-1.2], requires_grad=True)
    terms = loss_of(logprob, behaviour, torch.tensor([float(advantage)]), reference_T=reference)
    terms.loss.backward()
    assert logprob.grad is not None
    assert float(logprob.grad) == pytest.approx(-advantage * ratio if learns else 0)
    assert float(terms.clipped) == float(not learns)
    assert behaviour.grad is None and reference.grad is None


@pytest.mark.parametrize("loss", ["grpo", "cispo", "gspo"])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_a_ratio_past_all_bounds_makes_no_nan(advantage: float, loss: str) -> None:
    logprob = torch.tensor([-1.0, -500.0], requires_grad=True)
    behaviour, reference = torch.tensor([-200.0, -1.0]), torch.tensor([-300.0, -1.0])
    terms = loss_of(
        logprob, behaviour, torch.full((2,), advantage), loss=loss, reference_T=reference, kl_beta=0.1
    )
    terms.loss.backward()
    assert logprob.grad is not None and torch.isfinite(logprob.grad).all()
    assert all(torch.isfinite(it).all() for it in (terms.loss, terms.ratio, terms.kl_behaviour))


def test_c20_the_kl_term_follows_the_divergence_from_the_reference_whoever_sampled() -> None:
    """Over every token a behaviour could have sampled, as often as it would: KL(policy || reference)."""
    scores, behaviour_V, reference_V = table(20, 3).double()[:, :7]
    scores = scores.clone().requires_grad_()
    behaviour_V, reference_V = behaviour_V.log_softmax(0), reference_V.log_softmax(0)
    reference_V.requires_grad_()
    terms = loss_of(
        scores.log_softmax(0), behaviour_V, torch.zeros(7), weight_T=behaviour_V.exp(),
        reference_T=reference_V, kl_beta=0.5,
    )  # fmt: skip
    terms.loss.backward()
    found = scores.grad
    assert found is not None and reference_V.grad is None
    scores.grad = None
    policy_V = scores.log_softmax(0)
    divergence = (policy_V.exp() * (policy_V - reference_V.detach())).sum()
    (0.5 * divergence).backward()
    torch.testing.assert_close(terms.loss, 0.5 * divergence)
    torch.testing.assert_close(found, scores.grad)


def test_c21_entropy_is_that_of_the_sampled_tokens_at_the_sampling_temperature() -> None:
    batch = make_batch([replace(sample, temperature=1.3) for sample in random_samples(21, groups=1)])
    logits = table(21)
    expected = []
    for sample in range(batch.sequences):
        places = np.flatnonzero(batch.sampled[batch.span(sample)]) - 1
        expected.append(torch.distributions.Categorical(logits=logits[places] / 1.3).entropy())
    found = measure(TablePolicy(logits), batch).metrics["entropy"]
    assert found == pytest.approx(float(torch.cat(expected).mean()), rel=1e-5)


def test_nothing_to_learn_from_leaves_the_optimizer_untouched() -> None:
    policy = trained_policy()
    before = {name: master.detach().clone() for name, master in policy.master_weights.items()}
    optimizer = torch.optim.AdamW(policy.master_weights.values(), lr=1e-2, weight_decay=0.1)
    flat = make_batch([replace(sample, reward=1.0) for sample in random_samples(3)])
    trained = update(policy, optimizer, flat, SETTINGS, ALONE)
    assert trained.metrics["updated"] == 0
    assert trained.counts["trained"] == 0
    assert trained.counts["dropped"] == {"no variance in its group": 9}
    assert all(torch.equal(master, before[name]) for name, master in policy.master_weights.items())
    assert not optimizer.state
