"""An engine whose logprobs are off by bf16's noise stops neither grpo nor gspo, at lag 0, 1 and 2 (C51).

Learning itself: the policy that is trained answers, a rule rewards, the real recipe takes the step, and old
logprobs are the trainer's own. Noise of a standard deviation of 0.012 to 0.054 is put on what the engine said
of the sampled tokens, as between engines and trainers in bf16; the answers are the policy's all the same.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import pytest
import torch
from torch import Tensor

from launcher.client.alarms import Alarms
from runtime.shared.batch import Batch
from runtime.trainer.policy import Policy
from tests.runtime import recipe_here
from tests.runtime.trainer_fixtures import VOCABULARY, Sample, make_batch
from tests.support.step_records import step_record

pytestmark = pytest.mark.slow  # 28 trainings

MEMBERS, PROMPT, ANSWER = 16, 4, 4
SEEDS = range(3)
# How far clips and norms may be from those without noise, over the steps of a training.
CLIP_APART, NORM_APART = 0.05, 0.2


@dataclass(frozen=True)
class Shape:
    """How many steps old what a step trains is, by its two groups; how many steps, and their rate.

    Stale ones learn more slowly: at this rate an answer of two steps ago is itself no reason for an alarm.
    `rise`: by how much the reward rises at least.
    """

    lags: tuple[int, int]
    steps: int
    rate: float
    rise: float


SHAPES = {"fresh": Shape((0, 0), 10, 1e-2, 0.15), "stale": Shape((1, 2), 12, 5e-3, 0.05)}


@dataclass(frozen=True)
class Answered:
    """A group's answers [M, A] of one prompt, their logprobs, and the version that sampled them."""

    prompt: list[int]
    ids: list[list[int]]
    said_MA: Tensor
    version: int

    @property
    def rewards(self) -> list[float]:
        """The share of tokens of the lower third: a bandit's arms, that only trying shows."""
        return [fmean(token < VOCABULARY // 3 for token in answer) for answer in self.ids]


@dataclass(frozen=True)
class Learned:
    """By step: the mean reward of what its policy then answers, and what the trainer measured."""

    rewards: list[float]
    measured: list[dict[str, float]]

    @property
    def last(self) -> float:
        return fmean(self.rewards[-3:])

    def mean(self, name: str) -> float:
        return fmean(it[name] for it in self.measured)


@torch.no_grad()
def answered(policy: Policy, version: int, group: int, generator: torch.Generator) -> Answered:
    """What the policy says now, at temperature 1."""
    prompt = list(range(10 * group + 5, 10 * group + 5 + PROMPT))
    tokens_ML, logprobs = torch.tensor([prompt] * MEMBERS), []
    for size in range(PROMPT, PROMPT + ANSWER):
        mask = torch.ones(MEMBERS, size, size, dtype=torch.bool).tril()
        hidden = policy.hidden(tokens_ML, torch.arange(size).expand(MEMBERS, size), mask)
        all_MV = policy.output(hidden[:, -1]).float().log_softmax(-1)
        next_M1 = all_MV.exp().multinomial(1, generator=generator)
        logprobs.append(all_MV.gather(1, next_M1))
        tokens_ML = torch.cat([tokens_ML, next_M1], 1)
    return Answered(prompt, tokens_ML[:, PROMPT:].tolist(), torch.cat(logprobs, 1), version)


def batch_of(step: int, groups: list[Answered], noise: float, seed: int) -> Batch:
    """A step on these answers, as an engine would say their logprobs that is off by noise."""
    samples = [
        Sample([(it.prompt, False), (ids, True)], number, reward)
        for number, it in enumerate(groups)
        for ids, reward in zip(it.ids, it.rewards, strict=True)
    ]
    batch = make_batch(samples, step)
    logprobs = np.zeros(len(batch.tokens), np.float32)
    logprobs[batch.sampled == 1] = torch.cat([it.said_MA for it in groups]).flatten().numpy()
    off = np.random.default_rng(1000 * seed + step).normal(0, 1, len(logprobs))
    logprobs += (noise * off * batch.sampled).astype(np.float32)
    return replace(
        batch, logprobs=logprobs, version=np.repeat([it.version for it in groups], MEMBERS).astype(np.int64)
    )


def learn(folder: Path, loss: str, shape: Shape, noise: float, seed: int) -> Learned:
    """A training of its own. Every answer is the policy's, whatever the noise; draws are the seed's."""
    keys = {
        "loss": loss,
        "learning_rate": shape.rate,
        "keep_checkpoints": 4,
        "pack_tokens": 512,
        "seed": seed,
    }
    config = recipe_here.configured(folder, keys)
    generator = torch.Generator().manual_seed(seed)
    rewards = list[float]()
    with recipe_here.set_up(config) as recipe:

        def ask(group: int, version: int) -> Answered:
            return answered(recipe.policy, version, group, generator)

        # By group, what was asked for and is not trained yet: at its lag so many steps ahead.
        ahead = [deque(ask(group, 0) for _ in range(lag)) for group, lag in enumerate(shape.lags)]
        for step in range(1, shape.steps + 1):
            for group, waiting in enumerate(ahead):
                waiting.append(ask(group, step - 1))
            rewards.append(fmean(reward for waiting in ahead for reward in waiting[-1].rewards))
            recipe_here.give(config, batch_of(step, [it.popleft() for it in ahead], noise, seed))
            recipe.train()
        recipe.cleanup()
    return Learned(rewards, list(recipe_here.measured(folder).values()))


def alarms(learned: Learned) -> list[str]:
    """What the client would raise of it."""
    raised = Alarms()
    for step, (reward, it) in enumerate(zip(learned.rewards, learned.measured, strict=True), start=1):
        masked = it["masked_tokens"] / it["trained_tokens"]
        answers = it["masked_sequences"] / (2 * MEMBERS)
        seen = {name: it[name] for name in ("entropy", "kl_behaviour", "kl_reference", "ratio_max")}
        raised.observe(step_record(step, [reward], masked=masked, masked_answers=answers, **seen))
    return [it.text for it in raised.raised]


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str, float], list[Learned]]:
    """A training for each seed, made once."""

    @functools.cache
    def of(loss: str, age: str, noise: float) -> list[Learned]:
        folders = {seed: tmp_path_factory.mktemp(loss) for seed in SEEDS}
        return [learn(folder, loss, SHAPES[age], noise, seed) for seed, folder in folders.items()]

    return of


@pytest.mark.parametrize(
    ("loss", "age", "noise"),
    [
        ("gspo", "fresh", 0.012),
        ("gspo", "fresh", 0.054),
        ("gspo", "stale", 0.054),
        ("grpo", "fresh", 0.054),
        ("grpo", "stale", 0.054),
        pytest.param("gspo", "stale", 0.012, marks=pytest.mark.long),
        pytest.param("grpo", "fresh", 0.012, marks=pytest.mark.long),
        pytest.param("grpo", "stale", 0.012, marks=pytest.mark.long),
    ],
)
def test_c51_an_engine_that_is_off_by_bf16s_noise_stops_no_learning(
    learned: Callable[[str, str, float], list[Learned]], loss: str, age: str, noise: float
) -> None:
    exact, noisy = learned(loss, age, 0.0), learned(loss, age, noise)
    for one in (exact, noisy):
        assert fmean(it.last - it.rewards[0] for it in one) > SHAPES[age].rise
        assert [alarms(it) for it in one] == [[]] * len(SEEDS)
    apart = fmean(it.last for it in noisy) - fmean(it.last for it in exact)
    error = math.sqrt(sum(stdev(it.last for it in one) ** 2 / len(SEEDS) for one in (exact, noisy)))
    assert abs(apart) <= 2 * error, f"{apart:+.3f}, of a standard error of {error:.3f}"
    for one, other in zip(exact, noisy, strict=True):
        assert other.mean("clip_fraction") == pytest.approx(one.mean("clip_fraction"), abs=CLIP_APART)
        assert max(it["clip_fraction"] for it in other.measured) < 0.9
        assert other.mean("grad_norm") == pytest.approx(one.mean("grad_norm"), rel=NORM_APART)
        assert other.mean("kl_behaviour") >= 0.9 * noise**2 / 2, "there was no noise"
        if age == "fresh":
            assert {it["clip_fraction"] for it in other.measured} == {0.0}
