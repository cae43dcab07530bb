"""A supervised step at the trainer: its answers' tokens carry loss, ends included, and nothing else (C53)."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime.gateway.steps.examples import TokenisedExample
from runtime.gateway.steps.sft_batch import build_sft_batch
from runtime.shared.batch import Batch, BatchError, read_batch, step_folder, write_batch
from runtime.shared.checkpoint import CheckpointStore
from runtime.shared.step_settings import SettingsError, UpdateSettings
from runtime.shared.train_config import TrainConfig
from runtime.trainer.ranks import Ranks
from runtime.trainer.sft import sft_gradients
from tests.runtime.rank_processes import run_ranks
from tests.runtime.recipe_here import configured, give, measured, train
from tests.runtime.trainer_fixtures import (
    ALONE,
    EOS,
    VOCABULARY,
    Measured,
    TablePolicy,
    assert_same_gradient,
    make_batch,
    peft_model,
    random_samples,
    table,
    trained_policy,
)


def settings_of(**said: Any) -> UpdateSettings:
    meta = {"kind": "supervised", "settings": said}
    return UpdateSettings.of(TrainConfig(pack_tokens=128).model_dump(), meta)


def learnable(seed: int, examples: int = 5) -> list[TokenisedExample]:
    """Conversations of one to three answers, each with its end; the last one's prompt comes twice."""
    random = np.random.default_rng(seed)
    found = []
    for example in range(examples):
        tokens: list[int] = []
        answers = []
        for _ in range(1 + example % 3):
            tokens += random.integers(3, VOCABULARY, 6 + int(random.integers(5))).tolist()
            start = len(tokens)
            tokens += [*random.integers(3, VOCABULARY, 2 + int(random.integers(6))).tolist(), EOS]
            answers.append((start, len(tokens)))
        found.append(TokenisedExample(example, tokens, answers))
    start = found[-1].answers[0][0]
    return [*found, TokenisedExample(examples, [*found[-1].tokens[:start], 5, 7, EOS], [(start, start + 3)])]


def examples_of(learned: list[TokenisedExample], step: int = 1, **meta: Any) -> Batch:
    return build_sft_batch(
        learned, {"schema": 1, "kind": "supervised", "step": step, "key": f"k{step}", **meta}
    )


def apart(learned: list[TokenisedExample]) -> list[TokenisedExample]:
    """Each answer as a sequence of its own."""
    return [
        TokenisedExample(one.example, one.tokens[:end], [(start, end)])
        for one in learned
        for start, end in one.answers
    ]


def measure(
    policy: Any, batch: Batch, settings: UpdateSettings | None = None, ranks: Ranks = ALONE
) -> Measured:
    for master in policy.master_weights.values():
        master.grad = None
    metrics = sft_gradients(policy, batch, settings or settings_of(), ranks)
    return Measured({name: master.grad.clone() for name, master in policy.master_weights.items()}, metrics)


def test_c53_the_loss_is_the_cross_entropy_that_transformers_has_on_the_same_ids(tmp_path: Path) -> None:
    policy, learned = trained_policy(), learnable(1)
    policy.export_adapter(tmp_path, "tiny")
    model = peft_model(tmp_path)
    total, tokens = 0.0, 0
    for one in learned:
        ids = torch.tensor([one.tokens])
        labels = torch.full_like(ids, -100)
        for start, end in one.answers:
            labels[0, start:end] = ids[0, start:end]
        count = int((labels != -100).sum())
        total += float(model(input_ids=ids, labels=labels).loss) * count
        tokens += count
    found = measure(policy, examples_of(learned)).metrics
    assert found["loss"] == pytest.approx(total / tokens, rel=1e-5)
    assert found["perplexity"] == pytest.approx(np.exp(total / tokens), rel=1e-5)


@pytest.mark.parametrize("normaliser", ["token", "sequence"])
def test_c53_every_token_of_an_answer_and_its_end_carry_loss_and_no_token_of_a_prompt(
    normaliser: str,
) -> None:
    """By hand: at the place before each learned token the gradient is its weight x (softmax - one-hot)."""
    logits, learned = table(3).double(), learnable(3)
    expected = np.zeros(logits.shape)
    likely = torch.softmax(logits, -1).numpy()
    lengths = [end - start for one in learned for start, end in one.answers]
    loss = 0.0
    for one in learned:
        for start, end in one.answers:
            by = {"token": sum(lengths), "sequence": len(lengths) * (end - start)}[normaliser]
            for place in range(start, end):
                expected[place - 1] += (likely[place - 1] - np.eye(VOCABULARY)[one.tokens[place]]) / by
                loss -= np.log(likely[place - 1, one.tokens[place]]) / by
    found = measure(TablePolicy(table(3)), examples_of(learned), settings_of(normaliser=normaliser))
    assert found.metrics["loss"] == pytest.approx(loss, rel=1e-5)
    assert np.abs(found.gradient["table"].numpy() - expected).max() < 1e-6


def test_c53_answers_in_one_sequence_are_learned_as_answers_apart() -> None:
    policy, learned = trained_policy(), learnable(4)
    together, single = (measure(policy, examples_of(one)) for one in (learned, apart(learned)))
    assert_same_gradient(together.gradient, single.gradient)
    assert together.metrics == pytest.approx(single.metrics, rel=1e-5)


def test_c15_packs_and_ranks_change_nothing_of_what_examples_teach(tmp_path: Path) -> None:
    policy, batch = trained_policy(), examples_of(learnable(5, examples=9))
    whole = measure(policy, batch, settings_of(kl_beta=0.2).model_copy(update={"pack_tokens": 4096}))
    small = measure(policy, batch, settings_of(kl_beta=0.2).model_copy(update={"pack_tokens": 64}))
    assert_same_gradient(small.gradient, whole.gradient)
    assert small.metrics == pytest.approx(whole.metrics, rel=1e-5)
    assert whole.metrics["kl_reference"] > 0
    run_ranks(2, functools.partial(part_of, tmp_path))
    for name, value in torch.load(tmp_path / "gradient").items():
        assert float((value - whole.gradient[name]).abs().max()) < 1e-5, name


def part_of(folder: Path, ranks: Ranks) -> None:
    batch = examples_of(learnable(5, examples=9))
    found = measure(
        trained_policy(), batch, settings_of(kl_beta=0.2).model_copy(update={"pack_tokens": 64}), ranks
    )
    if ranks.is_rank_zero:
        torch.save(found.gradient, folder / "gradient")


def test_a_kl_term_holds_each_learned_token_near_the_model_before_training() -> None:
    logits = table(6)
    batch = examples_of(learnable(6))
    plain, held = (measure(TablePolicy(logits), batch, settings_of(kl_beta=beta)) for beta in (0.0, 0.5))
    learned = batch.sampled.astype(bool)
    pull = (held.gradient["table"] - plain.gradient["table"]) / 0.5
    # The gradient of half the squared distance of logprobs, by autograd.
    free = logits.clone().requires_grad_()
    distance = torch.zeros(())
    for row in range(batch.sequences):
        span = batch.span(row)
        (places,) = np.nonzero(learned[span])
        ids = torch.from_numpy(batch.tokens[span][places]).long()
        logprob = torch.log_softmax(free[places - 1], -1)[torch.arange(len(ids)), ids]
        distance = distance + ((logprob + np.log(VOCABULARY)) ** 2).sum() / 2
    (distance / int(learned.sum())).backward()
    assert free.grad is not None
    torch.testing.assert_close(pull, free.grad, rtol=1e-4, atol=1e-6)


# ------------------------------------------------------------------ the recipe


def steps() -> list[Batch]:
    """Examples, rewards, and examples at another rate."""
    said = {"learning_rate": 2e-3, "weight_decay": 0.5, "normaliser": "sequence"}
    return [
        examples_of(learnable(1), 1),
        make_batch(random_samples(2, groups=4), step=2),
        examples_of(learnable(3), 3, settings=said),
    ]


def adapters(folder: Path) -> list[str]:
    return [one.adapter_sha256 for one in CheckpointStore(folder / "checkpoints").readable()]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("straight")
    config = configured(folder, {"learning_rate": 1e-3})
    give(config, *steps())
    train(config)
    return folder


def test_c53_examples_are_a_step_like_any_other_stopped_and_gone_on_with(
    straight: Path, tmp_path: Path
) -> None:
    config = configured(tmp_path, {"learning_rate": 1e-3})
    for batch in steps():
        give(config, batch)
        train(config)
    assert adapters(tmp_path) == adapters(straight) and len(set(adapters(straight))) == 3
    found = measured(straight)
    assert [found[step]["updated"] for step in (1, 2, 3)] == [1, 1, 1]
    assert [found[step]["learning_rate"] for step in (1, 2, 3)] == pytest.approx([1e-3, 1e-3, 2e-3])
    third = CheckpointStore(straight / "checkpoints").load("step-000003").state
    assert third["kind"] == "supervised" and third["settings"]["weight_decay"] == 0.5
    assert "loss" not in third["settings"] and third["settings"]["normaliser"] == "sequence"
    learned = sum(end - start for one in learnable(3) for start, end in one.answers)
    assert third["counts"]["learned_tokens"] == learned == found[3]["trained_tokens"]
    assert third["counters"]["updates"] == 3


def test_c53_what_is_learned_grows_likelier_step_by_step(tmp_path: Path) -> None:
    config = configured(tmp_path, {"learning_rate": 2e-2})
    give(config, *(examples_of(learnable(1), step) for step in range(1, 7)))
    train(config)
    said = [measured(tmp_path)[step]["perplexity"] for step in range(1, 7)]
    assert said[-1] < said[0] / 3, said


@pytest.mark.parametrize(
    "said",
    [
        {"loss": "grpo"}, {"clip_high": 0.3}, {"scale_rewards": False}, {"overlong": "keep"},
        {"normaliser": "constant"},
    ],
)  # fmt: skip
def test_a_key_of_rewards_given_with_examples_is_refused_by_its_name(said: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=f"^{next(iter(said))}="):
        settings_of(**said)


def test_what_the_run_says_of_its_loss_is_not_said_of_examples() -> None:
    run = {"loss": "gspo", "kl_beta": 0.4, "overlong": "keep", "weight_decay": 0.3, "clip_high": 0.2}
    keys = TrainConfig.model_validate(run).model_dump()
    found = UpdateSettings.of(keys, {"kind": "supervised"})
    assert (found.normaliser, found.kl_beta, found.weight_decay) == ("token", 0.0, 0.3)


def test_a_batch_of_examples_has_no_reward_and_something_to_learn_in_every_sequence(tmp_path: Path) -> None:
    batch = examples_of(learnable(1))
    write_batch(step_folder(tmp_path, 1), batch)
    again = read_batch(step_folder(tmp_path, 1))
    assert again.kind == "supervised" and all(
        np.array_equal(value, again.arrays()[name]) for name, value in batch.arrays().items()
    )
    rewarded = replace(batch, reward=batch.reward + 1)
    unlearned = examples_of([*learnable(1), TokenisedExample(9, [3, 4, 5], [])])
    for broken, why in ((rewarded, "examples have rewards"), (unlearned, "no answer to learn")):
        with pytest.raises(BatchError, match=why):
            write_batch(step_folder(tmp_path, 2), broken)
