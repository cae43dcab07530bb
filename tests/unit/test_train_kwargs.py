"""The table of train_kwargs: every keyword is applied, checked or said (A4); what is hinted exists (C60)."""

from __future__ import annotations

import functools
import re
import shlex
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.client.dspy.programs import NEUTRAL_VALUES as NEUTRAL_FOR_LMS
from launcher.client.train_kwargs import to_json
from launcher.config import runtime_config
from runtime.shared.runtime_config import RuntimeConfig
from runtime.shared.train_config import Loss
from runtime.shared.train_kwargs import TABLE, RunContext, TrainKwargsResponse, read
from runtime.shared.train_kwargs.table import NEUTRAL
from tests.support import readme_commands

SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LORA = {"lora_alpha": 16, "lora_dropout": 0.05, "r": 8, "target_modules": SEVEN}
# Arbor's quickstart, the PAPILLON tutorial and the blog, with what each asks for.
QUICKSTART: dict[str, Any] = {
    "temperature": 1.0, "top_k": -1, "top_p": 1.0, "repetition_penalty": 1.0, "beta": 0.0,
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4.0, "gradient_checkpointing": True,
    "learning_rate": 1e-6, "lr_scheduler_type": "constant_with_warmup", "fp16": True, "max_grad_norm": 1.0,
    "max_prompt_length": None, "max_completion_length": None, "report_to": "wandb", "log_completions": True,
    "max_steps": 1000, "logging_steps": 1, "loss_type": "dapo", "num_training_gpus": 3,
    "num_inference_gpus": 1, "weight_decay": 0.001, "scale_rewards": False, "lora_config": LORA,
}  # fmt: skip
PAPILLON = {**{name: value for name, value in QUICKSTART.items() if name != "fp16"}, "bf16": True}
BLOG: dict[str, Any] = {
    "per_device_train_batch_size": 2, "temperature": 1.0, "beta": 0.04, "learning_rate": 5e-6,
    "gradient_checkpointing": True, "bf16": True, "lr_scheduler_type": "constant_with_warmup",
    "num_training_gpus": 2, "lora_config": {"r": 16, "lora_alpha": 16, "target_modules": "all-linear",
                                            "bias": "none", "task_type": "CAUSAL_LM"},
}  # fmt: skip
OTHERS: dict[str, Any] = {
    "warmup_steps": 10, "soft_completion_penalty_length": None, "mask_truncated_completions": True,
    "max_seq_len": 4096, "gradient_checkpointing_kwargs": {"use_reentrant": False}, "num_generations": 8,
    "generation_batch_size": 16, "async_generation_timeout": 600, "run_name": "mine", "num_iterations": 2,
    "epsilon": 0.2, "epsilon_high": 0.28, "seed": 7, "importance_sampling_level": "sequence",
    "num_batches_ahead": 1, "num_train_epochs": 1, "packing": True, "output_dir": "out", "use_peft": False,
    "min_p": 0.0, "warmup_ratio": 0.1, "max_length": 2048, "model": "Qwen/Qwen2.5-1.5B-Instruct",
}  # fmt: skip


def config(**changes: Any) -> RuntimeConfig:
    places = {"run_id": "r", "state_dir": "none", "socket_dir": "none"}
    return RuntimeConfig.model_validate({**places, "model_path": "Qwen/Qwen2.5-1.5B-Instruct", **changes})


OTHERWISE = config(
    device="cuda",
    model_path="Qwen/Qwen3-8B",
    engines=7,
    train_processes=7,
    max_staleness=0,
    engine={"max_model_len": 256},
    train={"lora": {"rank": 3, "target_modules": ["q_proj"]}, "seed": 99, "activation_checkpointing": False},
)
FITS = config(device="cuda", dtype="bfloat16", engines=1, train_processes=3, train={"lora": {"rank": 8}})


# TRL's own, where a loss_type is given and no clip.
CLIP = {"clip_low": 0.2, "clip_high": 0.2}


def asked(
    train_kwargs: dict[str, Any], of: RuntimeConfig | None = None, strict: bool = True, steps: int = 20
) -> TrainKwargsResponse:
    return read(train_kwargs, RunContext(of or config(), 4096, tuple(SEVEN)), strict=strict, steps=steps)


def refused(train_kwargs: dict[str, Any], of: RuntimeConfig | None = None) -> dict[str, tuple[str, str]]:
    return {it.key: (it.why, it.launch) for it in asked(train_kwargs, of).refusals}


def applied(train_kwargs: dict[str, Any], of: RuntimeConfig | None = None) -> dict[str, Any]:
    answer = asked(train_kwargs, of)
    assert not answer.refusals
    return answer.settings.model_dump(exclude_none=True)


@pytest.mark.parametrize("document", [QUICKSTART, PAPILLON], ids=["quickstart", "papillon"])
def test_a04_a_documents_own_keywords_are_all_taken_by_the_run_that_fits(document: dict[str, Any]) -> None:
    answer = asked(document, FITS)
    assert not answer.refusals
    assert answer.settings.model_dump(exclude_none=True) == {
        "learning_rate": 1e-6, "schedule": "constant", "weight_decay": 0.001, "max_grad_norm": 1.0,
        "loss": "dapo", "clip_low": 0.2, "clip_high": 0.2, "scale_rewards": False, "kl_beta": 0.0,
    }  # fmt: skip
    assert set(answer.sampling) == {"temperature", "top_k", "top_p", "repetition_penalty"}


@pytest.mark.parametrize("name", sorted({*QUICKSTART, *PAPILLON, *BLOG, *OTHERS, *TABLE}))
def test_a04_every_keyword_is_applied_or_checked_or_said(name: str) -> None:
    values = [it[name] for it in (QUICKSTART, PAPILLON, BLOG, OTHERS) if it.get(name) is not None]
    for value in values or ["some text", 3, 0.5]:
        answer = asked({name: value}, config(device="cuda"))
        match TABLE[name].kind:
            case "applied":
                is_token = (name, value) == ("importance_sampling_level", "token")
                assert answer.settings.model_dump(exclude_none=True) or answer.refusals or is_token
            case "sampling":
                assert name in answer.sampling or answer.refusals
            case "noted":
                assert any(note.startswith(name) for note in answer.notes)
            case "checked":
                answer = asked({name: value}, OTHERWISE)
                assert answer.notes or answer.refusals
        assert not answer.notes or all(name in note for note in answer.notes)


def test_a04_what_says_nothing_is_silent() -> None:
    answer = asked(dict.fromkeys(TABLE))
    assert answer == TrainKwargsResponse()


@pytest.mark.parametrize(
    ("train_kwargs", "settings"),
    [
        ({"learning_rate": "2e-5"}, {"learning_rate": 2e-5}),
        ({"beta": 0.04}, {"kl_beta": 0.04}),
        ({"loss_type": "bnpo"}, {"loss": "grpo", "normaliser": "token"} | CLIP),
        ({"loss_type": "grpo"}, {"loss": "grpo", "normaliser": "sequence"} | CLIP),
        ({"loss_type": "dapo", "epsilon": 0.1}, {"loss": "dapo", "clip_low": 0.1, "clip_high": 0.1}),
        ({"loss_type": "dapo", "epsilon_high": 0.28}, {"loss": "dapo", "clip_low": 0.2, "clip_high": 0.28}),
        ({"loss_type": "dapo", "clip_high": 0.3}, {"loss": "dapo", "clip_low": 0.2, "clip_high": 0.3}),
        ({"loss_type": "dr_grpo"}, {"loss": "dr_grpo"}),
        ({"importance_sampling_level": "sequence"}, {"loss": "gspo", "normaliser": "sequence"}),
        (
            {
                "loss_type": "grpo",
                "importance_sampling_level": "sequence",
                "epsilon": 3e-4,
                "epsilon_high": 4e-4,
            },
            {"loss": "gspo", "normaliser": "sequence", "clip_low": 3e-4, "clip_high": 4e-4},
        ),
        ({"loss_type": "dapo", "importance_sampling_level": "token"}, {"loss": "dapo"} | CLIP),
        ({"scale_rewards": "group"}, {"scale_rewards": True}),
        ({"scale_rewards": "none"}, {"scale_rewards": False}),
        ({"epsilon": 0.1}, {"clip_low": 0.1, "clip_high": 0.1}),
        ({"epsilon": 0.2, "epsilon_high": 0.28}, {"clip_low": 0.2, "clip_high": 0.28}),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, {"loss": "cispo", "clip_high": 4.0}),
        ({"lr_scheduler_type": "constant", "warmup_steps": 5}, {"schedule": "constant", "warmup_steps": 0}),
        (
            {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 5},
            {"schedule": "constant", "warmup_steps": 5},
        ),
        (
            {"lr_scheduler_type": "linear", "warmup_ratio": 0.11, "max_steps": 1000},
            {"schedule": "linear", "warmup_steps": 3, "schedule_steps": 20},
        ),
        ({"lr_scheduler_type": "cosine"}, {"schedule": "cosine", "schedule_steps": 20}),
        ({"warmup_steps": 0.25}, {"warmup_steps": 5}),
        ({"mask_truncated_completions": False}, {"overlong": "keep"}),
        (
            {"soft_completion_penalty_length": 400, "max_completion_length": 512},
            {"overlong": "soft", "overlong_tokens": 512, "overlong_buffer": 112},
        ),
        (
            {"kl_beta": 0.1, "loss": "dapo", "clip_low": 0.1},
            {"kl_beta": 0.1, "loss": "dapo", "clip_low": 0.1},
        ),
    ],
)
def test_a05_what_a_keyword_means_is_in_the_settings_of_each_step(
    train_kwargs: dict[str, Any], settings: dict[str, Any]
) -> None:
    assert applied(train_kwargs) == settings


@pytest.mark.parametrize(
    ("train_kwargs", "key", "why"),
    [
        ({"learning_rate": True}, "learning_rate", "expected a number, not True"),
        ({"learning_rate": float("nan")}, "learning_rate", "expected a number, not nan"),
        ({"learning_rate": "fast"}, "learning_rate", "expected a number, not 'fast'"),
        ({"learning_rate": [1e-5]}, "learning_rate", "expected a number, not a list"),
        ({"learning_rate": 0}, "learning_rate", "should be greater than 0"),
        ({"weight_decay": -1}, "weight_decay", "greater than or equal to 0"),
        ({"max_grad_norm": 0}, "max_grad_norm", "a high limit is none"),
        ({"warmup_steps": 2.5}, "warmup_steps", "expected a whole number"),
        ({"scale_rewards": "batch"}, "scale_rewards", "of a whole batch"),
        ({"scale_rewards": 1}, "scale_rewards", "expected True, False, 'group' or 'none'"),
        ({"loss_type": "sapo"}, "loss_type", "there is grpo, bnpo, dapo, dr_grpo, cispo, gspo"),
        ({"lr_scheduler_type": "polynomial"}, "lr_scheduler_type", "constant_with_warmup, linear, cosine"),
        (
            {"loss_type": "bnpo", "importance_sampling_level": "sequence"},
            "importance_sampling_level",
            "'bnpo'",
        ),
        ({"loss_type": "gspo", "importance_sampling_level": "token"}, "importance_sampling_level", "whole"),
        ({"beta": 0.1, "kl_beta": 0.2}, "kl_beta", "beta says 0.1 of the same"),
        ({"loss_type": "dr_grpo", "scale_rewards": True}, "scale_rewards", "dr_grpo is grpo without"),
        ({"epsilon": 1.5}, "epsilon", "a ratio is never below 0"),
        ({"lr_scheduler_type": "linear", "warmup_steps": 20}, "warmup_steps", "its rise must end before"),
        ({"soft_completion_penalty_length": 400}, "soft_completion_penalty_length", "give it as well"),
        (
            {"soft_completion_penalty_length": 600, "max_completion_length": 512},
            "soft_completion_penalty_length",
            "below max_completion_length, which is 512",
        ),
        ({"temperature": 0}, "temperature", "above 0 and at most 2"),
        ({"top_p": 0.9}, "top_p", "a different distribution"),
        ({"lerning_rate": 1e-5}, "lerning_rate", "did you mean learning_rate?"),
        ({"lora_config": 8}, "lora_config", "expected a dict or a peft.LoraConfig"),
        ({"lora_config": {"rank": 8}}, "lora_config.rank", "it is unknown"),
        ({"lora_config": {"bias": "all"}}, "lora_config.bias", "there is none"),
        (
            {"lora_config": {"use_dora": True}},
            "lora_config.use_dora",
            "A and B of each layer and nothing else",
        ),
        (
            {"lora_config": {"target_modules": ".*_proj"}},
            "lora_config.target_modules",
            "a pattern is not read",
        ),
    ],
)
def test_a04_what_cannot_be_meant_is_refused_by_its_keyword(
    train_kwargs: dict[str, Any], key: str, why: str
) -> None:
    found = refused(train_kwargs)
    assert list(found) == [key]
    assert why in found[key][0]


def test_a04_a_schedule_that_falls_needs_to_know_where_it_ends() -> None:
    run = RunContext(config())
    (refusal,) = read({"lr_scheduler_type": "cosine"}, run).refusals
    assert (refusal.key, "max_steps" in refusal.why) == ("lr_scheduler_type", True)
    answer = read({"lr_scheduler_type": "cosine", "max_steps": 50}, run)
    assert (answer.settings.schedule_steps, answer.refusals) == (50, [])


@pytest.mark.parametrize(
    ("train_kwargs", "changes", "launch"),
    [
        ({"lora_config": {"r": 8}}, {}, "--set train.lora.rank=8"),
        ({"lora_config": {"lora_alpha": 32}}, {}, "--set train.lora.alpha=32"),
        ({"lora_config": {"use_rslora": True}}, {}, "--set train.lora.use_rslora=true"),
        (
            {"lora_config": {"target_modules": ["v_proj", "q_proj"]}},
            {},
            "--set train.lora.target_modules=q_proj,v_proj",
        ),
        (
            {"lora_config": {"target_modules": "all-linear"}},
            {"train": {"lora": {"target_modules": ["q_proj"]}}},
            "--set train.lora.target_modules=none",
        ),
        ({"num_training_gpus": 3}, {"device": "cuda"}, "--train-gpus 3"),
        ({"num_inference_gpus": 2}, {"device": "cuda"}, "--infer-gpus 2"),
        ({"bf16": True}, {"device": "cuda"}, "--set dtype=bfloat16"),
        ({"max_seq_len": 8192}, {"engine": {"max_model_len": 2048}}, "--set engine.max_model_len=8192"),
        ({"model": "Qwen/Qwen2.5-7B-Instruct"}, {}, "--model Qwen/Qwen2.5-7B-Instruct"),
        ({"seed": 42}, {}, "--set train.seed=42"),
        ({"num_batches_ahead": 3}, {}, "--set max_staleness=3"),
        ({"delta": 4.0}, {}, "--set train.dual_clip=4.0"),
    ],
)
def test_a04_a_run_that_is_otherwise_is_refused_with_the_options_that_fit(
    train_kwargs: dict[str, Any], changes: dict[str, Any], launch: str
) -> None:
    found = read(train_kwargs, RunContext(config(**changes), None, tuple(SEVEN)), strict=True)
    assert [it.launch for it in found.refusals] == [launch]


def test_a04_what_the_run_has_is_silent() -> None:
    lora = {"r": 8, "lora_alpha": 16, "target_modules": SEVEN[::-1], "bias": "none", "use_rslora": False}
    kwargs = {"lora_config": lora, "bf16": True, "num_training_gpus": 3, "num_inference_gpus": 1, "seed": 0,
              "model": "openai/arbor:Qwen/Qwen2.5-1.5B-Instruct", "num_iterations": 1}  # fmt: skip
    assert asked(kwargs, FITS) == TrainKwargsResponse()
    assert asked({"lora_config": {"target_modules": "all-linear"}}, FITS) == TrainKwargsResponse()


def test_a04_on_a_cpu_numbers_of_gpus_are_said_and_not_refused() -> None:
    answer = asked({"num_training_gpus": 3, "num_inference_gpus": 1, "bf16": True})
    assert not answer.refusals and len(answer.notes) == 3


def test_a04_a_client_that_sends_all_its_defaults_is_told_and_not_refused() -> None:
    short = config(engine={"max_model_len": 512})
    answer = read({"max_seq_len": 4096, "lerning_rate": 1}, RunContext(short))
    assert not answer.refusals
    assert [note.partition(":")[0] for note in answer.notes] == ["max_seq_len=4096", "lerning_rate"]


def test_x12_a_rate_that_is_arbors_is_said_and_used_as_it_is() -> None:
    answer = asked({"learning_rate": 1e-6})
    assert answer.settings.learning_rate == 1e-6
    assert [note for note in answer.notes if "Arbor makes an update for each group" in note]
    assert not asked({"learning_rate": 1e-5}).notes


def test_a04_another_loss_does_not_meet_what_the_run_says_of_its_own() -> None:
    run = config(train={"normaliser": "token", "scale_rewards": True, "clip_high": 0.3})
    assert applied({"loss_type": "gspo"}, run) == {"loss": "gspo"}
    assert applied({"loss_type": "dr_grpo"}, run) == {"loss": "dr_grpo"}


# ------------------------------------------------------------------ hints


_EACH = (
    True,
    False,
    0,
    1,
    3,
    1000,
    0.5,
    -1.0,
    "1e-6",
    "",
    "sequence",
    "linear",
    "batch",
    "x y",
    ["wandb"],
    {},
)
_VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 9000), st.floats(), st.text("ab1e-5_", max_size=6),
    st.sampled_from(["wandb", "sequence", "linear", "soft", "grpo", *get_args(Loss)]),
    st.lists(st.sampled_from(SEVEN), max_size=3),
    st.fixed_dictionaries({}, optional={"r": st.integers(0, 40), "lora_alpha": st.floats(0, 64),
                                        "target_modules": st.lists(st.sampled_from(SEVEN), max_size=3),
                                        "use_rslora": st.booleans(), "bais": st.just("none")}),
)  # fmt: skip
_NAMES = st.one_of(st.sampled_from(sorted(TABLE)), st.text("abcdefgh_", min_size=1, max_size=12))


@pytest.mark.process
@settings(max_examples=400, deadline=None)
@given(st.dictionaries(_NAMES, _VALUES, max_size=5), st.booleans(), st.sampled_from([config(), FITS]))
def test_c60_every_key_and_option_that_is_named_exists(
    train_kwargs: dict[str, Any], strict: bool, of: RuntimeConfig
) -> None:
    _check_texts(read(train_kwargs, RunContext(of, 512), strict=strict))


@pytest.mark.parametrize("name", [*TABLE, "lerning_rate", "r", "xyz"])
def test_c60_every_keyword_of_the_table_names_only_what_exists(name: str) -> None:
    values: list[Any] = [*_EACH, LORA, {"bais": "none", "target_modules": "all-linear"}]
    for of in (config(), FITS, OTHERWISE):
        for value in values:
            _check_texts(read({name: value, "max_completion_length": 600}, RunContext(of, 512), strict=True))


def _check_texts(answer: TrainKwargsResponse) -> None:
    known = runtime_config.defaults()
    for text in [*answer.notes, *(f"{it.why} {it.launch}" for it in answer.refusals)]:
        assert set(re.findall(r"--set ([\w.]+)=", text)) <= set(known)
        assert set(re.findall(r"\b((?:train|engine)\.[\w.]*\w)", text)) <= set(known)
    for refusal in answer.refusals:
        assert refusal.key and refusal.why
        if refusal.launch:
            assert _fault(refusal.launch) is None


@functools.cache
def _fault(options: str) -> str | None:
    return readme_commands.launch_fault([*shlex.split(options), "--", "python", "my.py"])


def test_c60_the_options_of_all_refusals_make_one_line_that_can_be_typed() -> None:
    answer = asked({"lora_config": LORA | {"target_modules": ["q_proj"]}, "seed": 3, "num_batches_ahead": 4})
    assert _fault(" ".join(it.launch for it in answer.refusals)) is None
    assert _fault("--set train.beta=0") is not None


def test_the_client_knows_the_same_neutral_values() -> None:
    of_lms = {name: tuple(it for it in values if it is not None) for name, values in NEUTRAL_FOR_LMS.items()}
    assert of_lms == NEUTRAL


# ------------------------------------------------------------------ as plain JSON


class _Task(StrEnum):
    CAUSAL_LM = "CAUSAL_LM"


@dataclass
class _Dictated:
    """As peft.LoraConfig is: a dataclass with sets and enums, and a `to_dict`."""

    r: int = 8
    lora_alpha: int = 16
    target_modules: set[str] = field(default_factory=lambda: {"v_proj", "q_proj"})
    lora_dropout: float = 0.05
    bias: str = "none"
    task_type: _Task = _Task.CAUSAL_LM
    rank_pattern: dict[str, int] = field(default_factory=dict)
    init_lora_weights: bool = True
    peft_type: str = "LORA"

    def to_dict(self) -> dict[str, Any]:
        return vars(self)


class _StandIn:
    r, lora_alpha, target_modules, lora_dropout, bias = 8, 16, {"v_proj", "q_proj"}, 0.05, "none"


@pytest.mark.parametrize("lora", [_Dictated(), _StandIn()])
def test_a04_an_object_like_pefts_is_read(lora: Any) -> None:
    sent = to_json({"lora_config": lora})["lora_config"]
    assert {name: sent[name] for name in ("r", "lora_alpha", "target_modules", "lora_dropout", "bias")} == {
        "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.05,
        "bias": "none",
    }  # fmt: skip
    narrow = config(train={"lora": {"rank": 8, "target_modules": ["q_proj", "v_proj"]}})
    assert not asked({"lora_config": sent}, narrow).refusals


def test_a04_numbers_of_numpy_are_numbers_and_secrets_stay_at_home() -> None:
    import numpy as np

    sent = to_json(
        {
            "learning_rate": np.float32(0.5),
            "seed": np.int64(3),
            "steps": np.array([1, 2]),
            "hub_token": "hf_mine",
            "hf_config": {"hub_token": "hf_mine"},
            "max_tokens": "512",
        }
    )
    assert sent["learning_rate"] == 0.5 and type(sent["learning_rate"]) is float
    assert (sent["seed"], sent["steps"], sent["max_tokens"]) == (3, [1, 2], "512")
    assert "hf_mine" not in str(sent)
    assert "hf_mine" not in str(asked({"hub_token": "hf_mine"}))


def test_a04_what_is_no_json_is_refused_by_its_keyword() -> None:
    with pytest.raises(TypeError, match="train_kwargs: callbacks: a object cannot be sent to the run"):
        to_json({"callbacks": [object()]})
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(TypeError, match="nested too deep"):
        to_json({"reward_weights": endless})


def test_s02_a_clip_that_the_run_was_told_stands_beside_a_loss_type() -> None:
    told = applied({"loss_type": "dapo"}, config(train={"clip_high": 0.35}))
    assert told == {"loss": "dapo", "clip_low": 0.2}
    assert "dynamic_sampling=True" in asked({"loss_type": "dapo"}).notes[0]
