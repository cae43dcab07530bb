"""What a step says of its own update: put over the run's keys, used for that step alone, recorded (C60)."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from runtime.shared.batch import Batch
from runtime.shared.checkpoint import CheckpointStore
from runtime.shared.schema import StepSettings
from runtime.shared.step_settings import SettingsError, resolve
from runtime.shared.train_config import TrainConfig
from tests.runtime.recipe_here import configured, give, measured, train
from tests.runtime.trainer_fixtures import make_batch, random_samples

RUN = {"learning_rate": 5e-3, "weight_decay": 0.1, "max_grad_norm": 0.5}


def settled(run: dict[str, Any], **said: Any) -> TrainConfig:
    return resolve(TrainConfig.model_validate(run), StepSettings(**said), step=1).train


def rates(keys: dict[str, Any], steps: range) -> list[float]:
    run = TrainConfig.model_validate(keys)
    return [resolve(run, None, step).learning_rate for step in steps]


# ------------------------------------------------------------------ the keys


@pytest.mark.quick
def test_c60_what_a_step_says_stands_over_the_run_and_the_rest_is_the_runs() -> None:
    run = {"loss": "dapo", "clip_high": 0.4, "kl_beta": 0.1, "learning_rate": 1e-4}
    found = settled(run, learning_rate=3e-4, weight_decay=0.2, scale_rewards=False)
    assert (found.learning_rate, found.weight_decay, found.scale_rewards) == (3e-4, 0.2, False)
    assert (found.loss, found.clip_high, found.kl_beta) == ("dapo", 0.4, 0.1)
    assert settled(run) == TrainConfig.model_validate(run).resolved()


@pytest.mark.quick
def test_c60_another_loss_brings_its_own_values_and_the_runs_loss_keeps_the_runs() -> None:
    run = {"loss": "grpo", "normaliser": "constant", "constant_tokens": 99, "clip_high": 0.6}
    assert settled(run, loss="grpo").clip_high == 0.6
    found = settled(run, loss="gspo", clip_low=0.1)
    assert found == TrainConfig(loss="gspo", clip_low=0.1).resolved()
    assert settled(run, normaliser="token").constant_tokens is None
    assert settled({"loss": "grpo"}, clip_high=3.5).dual_clip == 4.5, "it was not the run that said 3"


@pytest.mark.quick
def test_c60_another_schedule_or_overlong_leaves_what_the_run_said_of_its_own() -> None:
    run = {
        "schedule": "linear", "schedule_steps": 10, "warmup_steps": 3,
        "overlong": "soft", "overlong_tokens": 50, "overlong_buffer": 20,
    }  # fmt: skip
    found = settled(run, schedule="constant", overlong="keep")
    assert (found.schedule_steps, found.warmup_steps) == (None, 3)
    assert (found.overlong_tokens, found.overlong_buffer) == (None, None)
    assert settled(run, learning_rate=1.0).schedule_steps == 10


@pytest.mark.quick
@pytest.mark.parametrize(
    ("run", "said", "key"),
    [
        ({}, {"schedule": "cosine"}, "schedule"),
        ({}, {"schedule_steps": 9}, "schedule_steps"),
        ({}, {"schedule": "linear", "schedule_steps": 4, "warmup_steps": 4}, "warmup_steps"),
        ({"loss": "gspo"}, {"normaliser": "token"}, "normaliser"),
        ({}, {"loss": "dr_grpo", "scale_rewards": True}, "scale_rewards"),
        ({}, {"overlong": "soft"}, "overlong"),
        ({}, {"clip_low": 1.5}, "clip_low"),
        ({"dual_clip": 2.0}, {"clip_high": 3.0}, "dual_clip"),
    ],
)
def test_c60_a_contradiction_names_its_key(run: dict[str, Any], said: dict[str, Any], key: str) -> None:
    with pytest.raises(SettingsError, match=f"^{key}=") as refused:
        settled(run, **said)
    assert refused.value.key == key


@pytest.mark.quick
@pytest.mark.parametrize("value", [math.inf, math.nan, 0.0, -1.0])
def test_c60_a_steps_value_has_the_bounds_of_the_runs(value: float) -> None:
    for model in (TrainConfig, StepSettings):
        with pytest.raises(ValidationError, match="learning_rate"):
            model(learning_rate=value)


@pytest.mark.quick
def test_c60_the_rate_rises_over_the_warm_up_and_ends_where_its_schedule_does() -> None:
    assert rates({"learning_rate": 1.0}, range(1, 4)) == [1, 1, 1]
    assert rates({"learning_rate": 1.0, "warmup_steps": 4}, range(1, 7)) == [0.25, 0.5, 0.75, 1, 1, 1]
    falling = {"learning_rate": 2.0, "warmup_steps": 2, "schedule_steps": 6}
    linear = [1.0, 2.0, 2.0, 1.5, 1.0, 0.5, 0.0, 0.0]
    assert rates({**falling, "schedule": "linear"}, range(1, 9)) == pytest.approx(linear)
    half = math.sqrt(0.5)
    cosine = [1.0, 2.0, 2.0, 1 + half, 1.0, 1 - half, 0.0, 0.0]
    assert rates({**falling, "schedule": "cosine"}, range(1, 9)) == pytest.approx(cosine)


# ------------------------------------------------------------------ the update


def recorded(step: int, settings: dict[str, Any] | None = None) -> Batch:
    """Two answers of the first group are cut off, so that `overlong` says something."""
    samples = random_samples(step, groups=4)
    samples[:2] = [replace(sample, truncated=True) for sample in samples[:2]]
    batch = make_batch(samples, step=step)
    return replace(batch, meta=batch.meta | {"settings": settings})


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One step by the run's own keys: what every other run here goes on from."""
    folder = tmp_path_factory.mktemp("begun")
    go_on(folder, recorded(1))
    return folder


def go_on(folder: Path, *batches: Batch, **changes: Any) -> None:
    """One life of the trainer over these, by the run's keys with changes."""
    config = configured(folder, RUN | changes)
    give(config, *batches)
    train(config)


def adapters(folder: Path) -> list[str]:
    return [checkpoint.adapter_sha256 for checkpoint in CheckpointStore(folder / "checkpoints").readable()]


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def plain(begun: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "run"
    shutil.copytree(begun, folder)
    go_on(folder, recorded(2))
    return folder


@pytest.mark.parametrize(
    "said",
    [
        {"learning_rate": 2e-3, "weight_decay": 0.7},
        {"max_grad_norm": 0.01},
        {"loss": "cispo", "clip_high": 0.1},
        {"scale_rewards": True, "normaliser": "sequence"},
        {"kl_beta": 0.5, "overlong": "keep"},
    ],
    ids=lambda said: " ".join(said),
)
def test_c60_a_step_is_trained_as_a_run_with_its_keys_would_and_the_next_as_before(
    begun: Path, plain: Path, tmp_path: Path, said: dict[str, Any]
) -> None:
    by_step, by_run = tmp_path / "step", tmp_path / "run"
    for folder in (by_step, by_run):
        shutil.copytree(begun, folder)
    go_on(by_step, recorded(2, said), recorded(3))
    go_on(by_run, recorded(2), **said)
    go_on(by_run, recorded(3))
    assert adapters(by_step) == adapters(by_run)
    assert adapters(by_step)[1] != adapters(plain)[1], "it changes nothing here"
    settings = [line["settings"] for line in lines(by_step)]
    assert {key: settings[1][key] for key in said} == said
    own = {"schedule_step": None}
    assert settings[0] | own == settings[2] | own == settings[2] | own | RUN


def test_c60_a_schedule_goes_on_where_it_was_after_a_resume(tmp_path: Path) -> None:
    keys = {"schedule": "linear", "warmup_steps": 2, "schedule_steps": 6}
    batches = [recorded(1), recorded(2), recorded(3), recorded(4, {"schedule": "constant"}), recorded(5)]
    go_on(tmp_path / "a", *batches, **keys)
    for part in (batches[:2], batches[2:3], batches[3:]):
        go_on(tmp_path / "b", *part, **keys)
    expected = [2.5e-3, 5e-3, 5e-3, 5e-3, 2.5e-3]
    for folder in (tmp_path / "a", tmp_path / "b"):
        found = [measured(folder)[step]["learning_rate"] for step in range(1, 6)]
        assert found == pytest.approx(expected)
    assert adapters(tmp_path / "a") == adapters(tmp_path / "b")
    assert [line["settings"]["schedule_step"] for line in lines(tmp_path / "b")] == [0, 1, 2, 3, 4]


def test_c60_a_step_may_say_where_in_its_schedule_it_is(tmp_path: Path) -> None:
    said = {"schedule": "cosine", "schedule_steps": 8, "learning_rate": 1e-3}
    go_on(tmp_path, recorded(1, said | {"schedule_step": 4}), recorded(2, said | {"schedule_step": 0}))
    assert [measured(tmp_path)[step]["learning_rate"] for step in (1, 2)] == pytest.approx([5e-4, 1e-3])


def test_c60_settings_that_contradict_the_keys_of_a_replay_fail_their_step_alone(tmp_path: Path) -> None:
    go_on(tmp_path, recorded(1, {"normaliser": "token"}), recorded(2), loss="gspo")
    failed = json.loads((tmp_path / "steps" / "000001" / "failed.json").read_text())
    assert failed["error"].startswith(
        "SettingsError: normaliser=token does not fit: gspo clips whole answers"
    )
    assert list(measured(tmp_path)) == [2]
