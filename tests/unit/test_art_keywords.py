"""ART's keywords on a run here: each is applied, compared, said or refused by its name (B9)."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.shared.runtime_config import RuntimeConfig
from runtime.shared.train_kwargs import TABLES, RunContext, TrainKwargsResponse, read

# `LocalBackend.train` of openpipe-art 0.5.18, in its order: each by a value that is not its default, and what
# that is here.
TRAIN: dict[str, tuple[Any, str]] = {
    "learning_rate": (1e-5, "applied"),
    "loss_fn": ("ppo", "applied"),
    "loss_fn_config": ({"a": 1}, "refused"),
    "normalize_advantages": (False, "applied"),
    "adam_params": ({"lr": 1e-5}, "refused"),
    "kl_penalty_coef": (0.1, "applied"),
    "kl_penalty_reference_step": (3, "refused"),
    "kl_ref_adapter_path": ("/adapters/mine", "refused"),
    "epsilon": (0.3, "applied"),
    "epsilon_high": (0.4, "applied"),
    "advantage_balance": (0.5, "refused"),
    "scale_rewards": (False, "applied"),
    "importance_sampling_level": ("sequence", "applied"),
    "max_negative_advantage_importance_sampling_weight": (4.0, "refused"),
    "mask_prob_ratio": (True, "refused"),
    "kimi_k2_tau": (0.1, "refused"),
    "precalculate_logprobs": (True, "noted"),
    "allow_training_without_logprobs": (True, "noted"),
    "plot_tensors": (True, "noted"),
    "truncated_importance_sampling": (5.0, "refused"),
    "scale_learning_rate_by_reward_std_dev": (True, "refused"),
    "logprob_calculation_chunk_size": (512, "noted"),
    "packed_sequence_length": (4096, "noted"),
    "num_trajectories_learning_rate_multiplier_power": (0.5, "refused"),
    "save_checkpoint": (False, "noted"),
    "verbose": (True, "noted"),
}
DEFAULTS: dict[str, Any] = {
    "learning_rate": 5e-6, "loss_fn": "cispo", "loss_fn_config": None, "normalize_advantages": True,
    "adam_params": None, "kl_penalty_coef": 0.0, "kl_penalty_reference_step": None,
    "kl_ref_adapter_path": None, "epsilon": None, "epsilon_high": None, "advantage_balance": 0.0,
    "scale_rewards": True, "importance_sampling_level": "token",
    "max_negative_advantage_importance_sampling_weight": None, "mask_prob_ratio": False, "kimi_k2_tau": None,
    "precalculate_logprobs": False, "allow_training_without_logprobs": False, "plot_tensors": False,
    "truncated_importance_sampling": None, "scale_learning_rate_by_reward_std_dev": False,
    "logprob_calculation_chunk_size": 1024, "packed_sequence_length": None,
    "num_trajectories_learning_rate_multiplier_power": 0.0, "save_checkpoint": True, "verbose": False,
}  # fmt: skip
# Of 0.5.18's other `TrainConfig`s, and of a registration.
BESIDE = (
    "ppo", "grad_accumulation_sequences", "moe_routing_replay_bundle", "moe_routing_replay_path",
    "moe_routing_replay_strict", "peft_args", "max_seq_length",
)  # fmt: skip
PPO = {"loss": "grpo", "normaliser": "token"}
GSPO = {"loss": "gspo", "normaliser": "sequence"}


def asked(said: dict[str, Any], **config: Any) -> TrainKwargsResponse:
    places = {"run_id": "r", "state_dir": "none", "socket_dir": "none", "model_path": "Qwen/Qwen3-8B"}
    return read(said, RunContext(RuntimeConfig.model_validate(places | config)), strict=True, trainer="art")


def applied(said: dict[str, Any], **config: Any) -> dict[str, Any]:
    answer = asked(said, **config)
    assert not answer.refusals, answer.refusals
    return answer.settings.model_dump(exclude_none=True)


def test_b09_the_table_has_every_keyword_of_the_release_and_no_other() -> None:
    assert len(TRAIN) == 26 and list(DEFAULTS) == list(TRAIN)
    assert set(TABLES["art"]) == {*TRAIN, *BESIDE}


@pytest.mark.parametrize("name", TRAIN)
def test_b09_each_keyword_is_applied_said_or_refused_by_name(name: str) -> None:
    value, kind = TRAIN[name]
    answer = asked({name: value})
    match kind:
        case "applied":
            assert answer.settings.model_dump(exclude_none=True) and not answer.refusals
        case "noted":
            assert [note.partition("=")[0] for note in answer.notes] == [name] and not answer.refusals
        case _:
            assert [one.key for one in answer.refusals] == [name] and answer.refusals[0].why


def test_b09_arts_own_defaults_are_all_taken_and_what_changes_nothing_is_silent() -> None:
    answer = asked(DEFAULTS)
    assert not answer.refusals
    assert answer.settings.model_dump(exclude_none=True) == {
        "learning_rate": 5e-6, "loss": "cispo", "scale_rewards": True, "kl_beta": 0.0,
    }  # fmt: skip
    assert len(answer.notes) == 1 and answer.notes[0].startswith("learning_rate=5e-06: used as it is.")
    assert asked(dict.fromkeys(DEFAULTS)) == TrainKwargsResponse()


@pytest.mark.parametrize(
    ("said", "settings"),
    [
        ({"loss_fn": "ppo"}, PPO),
        ({"loss_fn": "ppo", "epsilon": 0.1}, PPO | {"clip_low": 0.1, "clip_high": 0.1}),
        ({"loss_fn": "cispo", "epsilon": 1.0}, {"loss": "cispo", "clip_low": 1.0}),
        ({"loss_fn": "cispo", "epsilon_high": 4.0}, {"loss": "cispo", "clip_high": 4.0}),
        ({"ppo": True}, PPO),
        ({"ppo": False, "epsilon": 1.0}, {"loss": "cispo", "clip_low": 1.0}),
        ({"importance_sampling_level": "token"}, {}),
        ({"loss_fn": "ppo", "importance_sampling_level": "sequence"}, GSPO),
        ({"normalize_advantages": False, "scale_rewards": True}, {"scale_rewards": False}),
        ({"normalize_advantages": True, "scale_rewards": False}, {"scale_rewards": False}),
        ({"kl_penalty_coef": 0.04}, {"kl_beta": 0.04}),
        ({"kl_penalty_reference_step": 0}, {}),
    ],
)  # fmt: skip
def test_b09_what_a_keyword_means_is_what_art_means_by_it(
    said: dict[str, Any], settings: dict[str, Any]
) -> None:
    assert applied(said) == settings


@pytest.mark.parametrize(
    ("said", "option"),
    [
        ({"truncated_importance_sampling": 5.0}, "--set train.mismatch_cap=5.0"),
        ({"max_negative_advantage_importance_sampling_weight": 4.0}, "--set train.dual_clip=4.0"),
        ({"peft_args": {"r": 64}}, "--set train.lora.rank=64"),
    ],
)
def test_b09_where_a_run_could_follow_the_option_is_named(said: dict[str, Any], option: str) -> None:
    assert [one.launch for one in asked(said).refusals] == [option]


def test_b09_a_run_that_has_it_already_says_nothing() -> None:
    said = {"truncated_importance_sampling": 5.0, "max_negative_advantage_importance_sampling_weight": 4.0}
    answer = asked(said, train={"mismatch_cap": 5.0, "dual_clip": 4.0})
    assert answer == TrainKwargsResponse()


@pytest.mark.parametrize(
    "said",
    [
        {"loss_fn": "importance_sampling"},
        {"loss_fn": "cispo", "importance_sampling_level": "sequence"},
        {"importance_sampling_level": "average"},
        {"epsilon": 1.5, "loss_fn": "ppo"},
        {"learning_rate": -1},
        {"learning_rat": 1e-5},
        {"scale_rewards": "batch"},
    ],
)
def test_b09_what_means_nothing_here_is_refused_by_name(said: dict[str, Any]) -> None:
    refusals = asked(said).refusals
    assert refusals and refusals[0].key in said


def test_b09_a_name_that_trl_has_too_is_read_as_arts() -> None:
    """TRL's cispo gives the highest ratio, ART's how far above 1 it is."""
    said = {"epsilon_high": 4.0}
    assert applied({"loss_fn": "cispo", **said})["clip_high"] == 4.0
    assert read({"loss_type": "cispo", **said}, RunContext(_config())).settings.clip_high == 3.0


def _config() -> RuntimeConfig:
    return RuntimeConfig(run_id="r", state_dir="none", socket_dir="none", model_path="Qwen/Qwen3-8B")
