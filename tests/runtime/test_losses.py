"""The loss as numbers: what carries it, at which temperature, against an oracle, and what leaves the step."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from runtime.training import grpo
from runtime.training.update import select, update
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
    random_samples,
    trained_policy,
)

UNIFORM = TablePolicy(torch.zeros(64, VOCABULARY))


def table(seed: int = 0, rows: int = 64) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed))


def test_c04_only_sampled_tokens_carry_loss_the_first_one_and_the_eos_included() -> None:
    prompt, observation = [10, 11, 12, 13], [30, 31]
    answers = [[20, 21], [22, 23]], [[40, 41], [42, 43]]
    batch = make_batch(
        [
            Sample(
                [(prompt, False), (first, True), (observation, False), (second, True), ([EOS + who], True)],
                group=0,
                reward=float(who),
            )
            for who, (first, second) in enumerate(answers)
        ]
    )
    lengths = np.diff(batch.offsets)
    batch.logprobs[batch.sampled.astype(bool)] = -math.log(VOCABULARY)
    tokens = int(batch.sampled.sum())
    assert tokens == 10 and set(lengths) == {11}
    expected = torch.zeros(64, VOCABULARY)
    for position in range(10):
        for sample, advantage in ((0, -0.5), (1, 0.5)):
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
    for sample in range(batch.samples):
        start = int(batch.offsets[sample])
        for at in range(start, int(batch.offsets[sample + 1])):
            if batch.sampled[at]:
                row = logits[at - start - 1].double().numpy() / temperature
                batch.logprobs[at] = row[batch.tokens[at]] - np.log(np.exp(row).sum())
    metrics = measure(TablePolicy(logits), batch).metrics
    assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-6)
    assert metrics["kl_behaviour"] == pytest.approx(0, abs=1e-9)
    hidden, target = logits[:5], torch.tensor([1, 2, 3, 4, 5])
    found = grpo.token_logprobs(hidden, lambda state: state, target, torch.full((5,), temperature))
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
    assert selected.dropped == {"logprob not finite": 1}
    assert selected.samples == [0, 1, 2, 3, 5, 6, 7, 8]
    without = measure(UNIFORM, sick)
    assert all(math.isfinite(value) for value in without.metrics.values())
    assert torch.isfinite(without.gradient["table"]).all()
    assert not torch.equal(without.gradient["table"], whole.gradient["table"])


def test_c11_the_log_softmax_is_in_fp32_whatever_the_logits_are() -> None:
    logits = (table(rows=40) * 6).bfloat16()
    target = torch.arange(40)
    found = grpo.token_logprobs(logits, lambda state: state, target, torch.full((40,), 1.3))
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
        found = grpo.token_logprobs(hidden, lambda state: state @ matrix.T, target, temperature, chunk=chunk)
        (found.logprob_T * torch.linspace(-1, 1, 50)).sum().backward()
        assert hidden.grad is not None and matrix.grad is not None
        return [found.logprob_T.detach(), found.entropy_T, hidden.grad, matrix.grad]

    for found, expected in zip(value_and_gradients(7), value_and_gradients(1024), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def oracle(logits, batch, *, low, high, beta, scale):
    """GRPO in numpy, sample by sample and token by token; the reference is uniform."""
    loss, count = 0.0, 0
    for sample in range(batch.samples):
        peers = batch.reward[batch.group == batch.group[sample]].astype(float)
        advantage = batch.reward[sample] - peers.mean()
        if scale:
            advantage /= np.sqrt(((peers - peers.mean()) ** 2).mean()) + 1e-6
        for at in range(batch.offsets[sample], batch.offsets[sample + 1]):
            if not batch.sampled[at]:
                continue
            row = logits[at - batch.offsets[sample] - 1] / batch.temperature[sample]
            logprob = row[batch.tokens[at]] - np.log(np.exp(row).sum())
            ratio = np.exp(logprob - batch.logprobs[at])
            surrogate = min(ratio * advantage, np.clip(ratio, 1 - low, 1 + high) * advantage)
            towards = -np.log(len(row)) - logprob
            loss += -surrogate + beta * (np.exp(towards) - towards - 1)
            count += 1
    return loss / count


@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_c16_loss_and_gradient_are_those_of_a_numpy_oracle(scale: bool, beta: float) -> None:
    logits = table(16)
    batch = make_batch([replace(sample, logprob=-4.6) for sample in random_samples(16, turns=2)])
    settings = replace(SETTINGS, kl_beta=beta, scale_rewards=scale)
    rules = {"low": settings.clip_low, "high": settings.clip_high, "beta": beta, "scale": scale}
    found = measure(TablePolicy(logits), batch, settings)
    exact = logits.double().numpy()
    assert found.metrics["loss"] == pytest.approx(oracle(exact, batch, **rules), rel=1e-5)
    assert 0.05 < found.metrics["clip_fraction"] < 0.95
    gradient = found.gradient["table"]
    for place in gradient.abs().flatten().topk(6).indices.tolist():
        position, token = divmod(place, VOCABULARY)
        up, down = exact.copy(), exact.copy()
        up[position, token] += 1e-5
        down[position, token] -= 1e-5
        slope = (oracle(up, batch, **rules) - oracle(down, batch, **rules)) / 2e-5
        assert float(gradient[position, token]) == pytest.approx(slope, rel=1e-3)


def test_c17_a_group_without_variance_has_advantage_exactly_zero() -> None:
    reward = torch.tensor([0.1, 0.1, 0.1, 0.0, 1.0, 0.7])
    found = grpo.advantages(reward, torch.tensor([0, 0, 0, 1, 1, 2]))
    assert found.value_M.tolist() == [0, 0, 0, -0.5, 0.5, 0]
    assert found.flat_M.tolist() == [True, True, True, False, False, True]
    assert found.flat_groups == 2
    scaled = grpo.advantages(reward, torch.tensor([0, 0, 0, 1, 1, 2]), scale=True)
    torch.testing.assert_close(scaled.value_M, torch.tensor([0, 0, 0, -1.0, 1.0, 0]))


def test_c17_a_reward_that_is_no_number_leaves_the_mean_and_is_never_trained() -> None:
    reward = torch.tensor([0.0, math.nan, 1.0, math.inf, 2.0])
    found = grpo.advantages(reward, torch.zeros(5, dtype=torch.long))
    assert found.value_M.tolist() == [-1, 0, 0, 0, 1]
    assert found.scored_M.tolist() == [True, False, True, False, True]
    batch = make_batch(random_samples(17, groups=2, members=3))
    batch.reward[4] = math.nan
    selected = select(batch, SETTINGS)
    assert selected.samples == [0, 1, 2, 3, 5]
    assert selected.dropped == {"reward not finite": 1}


def test_c17_a_dropped_group_leaves_the_denominator() -> None:
    samples = random_samples(18, groups=2)
    flat = [replace(sample, group=2, reward=0.3) for sample in samples[:3]]
    alone = measure(UNIFORM, make_batch(samples))
    assert select(make_batch([*samples, *flat]), SETTINGS).dropped == {"no variance in its group": 3}
    beside = measure(UNIFORM, make_batch([*samples, *flat]))
    assert_same_gradient(beside.gradient, alone.gradient, within=1e-6)
    assert beside.metrics["loss"] == pytest.approx(alone.metrics["loss"])


def test_c05_an_answer_cut_off_at_its_limit_is_left_out_or_kept_by_choice() -> None:
    samples = random_samples(5)
    batch = make_batch([replace(samples[0], truncated=True), *samples[1:]])
    assert select(batch, SETTINGS).dropped == {"truncated": 1}
    assert len(select(batch, replace(SETTINGS, mask_truncated=False)).samples) == len(samples)


def test_c05_what_a_cut_off_answer_earned_does_not_move_the_others() -> None:
    samples = random_samples(5)
    rich = replace(samples[0], truncated=True, reward=1000.0)
    beside = select(make_batch([rich, *samples[1:]]), SETTINGS).advantage_S[1:]
    alone = select(make_batch(samples[1:]), SETTINGS).advantage_S
    assert beside.tolist() == alone.tolist()


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
    terms = grpo.clipped_surrogate(
        logprob, behaviour, torch.tensor([float(advantage)]), clip_low=0.2, clip_high=0.28,
        reference_T=reference, kl_beta=0.0,
    )  # fmt: skip
    terms.loss.backward()
    assert logprob.grad is not None
    assert float(logprob.grad) == pytest.approx(-advantage * ratio if learns else 0)
    assert float(terms.clipped) == float(not learns)
    assert behaviour.grad is None and reference.grad is None


@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_a_ratio_past_all_bounds_makes_no_nan(advantage: float) -> None:
    logprob = torch.tensor([-1.0, -500.0], requires_grad=True)
    behaviour, reference = torch.tensor([-200.0, -1.0]), torch.tensor([-300.0, -1.0])
    terms = grpo.clipped_surrogate(
        logprob, behaviour, torch.full((2,), advantage), clip_low=0.2, clip_high=0.28,
        reference_T=reference, kl_beta=0.1,
    )  # fmt: skip
    terms.loss.backward()
    assert logprob.grad is not None and torch.isfinite(logprob.grad).all()
    assert torch.isfinite(torch.stack([terms.loss.detach(), terms.ratio, terms.kl_behaviour])).all()


def test_c20_the_kl_gradient_is_that_of_k3_and_flows_to_the_policy_only() -> None:
    logprob = torch.tensor([-1.0, -2.0], requires_grad=True)
    reference = torch.tensor([-1.5, -1.0], requires_grad=True)
    terms = grpo.clipped_surrogate(
        logprob, logprob.detach(), torch.zeros(2), clip_low=0.2, clip_high=0.28,
        reference_T=reference, kl_beta=0.5,
    )  # fmt: skip
    terms.loss.backward()
    expected = 0.5 * (1 - (reference - logprob).exp()).detach()
    torch.testing.assert_close(logprob.grad, expected)
    assert reference.grad is None


def test_c21_entropy_is_that_of_the_sampled_tokens_at_the_sampling_temperature() -> None:
    batch = make_batch([replace(sample, temperature=1.3) for sample in random_samples(21, groups=1)])
    logits = table(21)
    expected = []
    for sample in range(batch.samples):
        places = np.flatnonzero(batch.sampled[batch.span(sample)]) - 1
        expected.append(torch.distributions.Categorical(logits=logits[places] / 1.3).entropy())
    found = measure(TablePolicy(logits), batch).metrics["entropy"]
    assert found == pytest.approx(float(torch.cat(expected).mean()), rel=1e-5)


def test_nothing_to_learn_from_leaves_the_optimizer_untouched() -> None:
    policy = trained_policy()
    before = {name: master.detach().clone() for name, master in policy.masters.items()}
    optimizer = torch.optim.AdamW(policy.masters.values(), lr=1e-2, weight_decay=0.1)
    flat = make_batch([replace(sample, reward=1.0) for sample in random_samples(3)])
    trained = update(policy, optimizer, flat, SETTINGS, ALONE)
    assert trained.metrics["updated"] == 0
    assert trained.counts["trained"] == 0
    assert trained.counts["dropped"] == {"no variance in its group": 9}
    assert all(torch.equal(master, before[name]) for name, master in policy.masters.items())
    assert not optimizer.state
