"""A run that begins with an adapter: what the trainer commits as version 1 is that adapter, with its proof.

The recipe runs in this process, on a random model of two layers.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import load_file

from runtime.gateway.engines.probe_comparison import LogprobProbe
from runtime.recipes.grpo_lora import with_defaults
from runtime.shared.batch import empty_batch, step_folder, write_batch
from runtime.shared.model_shape import shape
from runtime.shared.peft_format import portable_name, tensor_shapes
from runtime.shared.projections import PROJECTIONS
from runtime.shared.start_adapter_layout import START
from runtime.shared.step_settings import UpdateSettings
from runtime.trainer.policy import PolicyError
from runtime.trainer.probe_logprobs import compute_probe_logprobs, fallback_probe_batch
from tests.runtime.recipe_here import configured, train
from tests.runtime.trainer_fixtures import LORA, make_batch, random_samples, tiny_model, trained_policy


def give(folder: Path, lora: Any = LORA) -> Path:
    """The adapter that a run in this folder begins with."""
    trained_policy(lora=lora).export_adapter(folder / START, "tiny")
    return folder / START


def record_start(folder: Path) -> None:
    meta = {"schema": 1, "kind": "restore", "step": 1, "from": START}
    write_batch(step_folder(folder / "steps", 1), empty_batch(meta))


def test_version_one_is_the_adapter_and_training_goes_on_from_it(tmp_path: Path) -> None:
    given = load_file(give(tmp_path) / "adapter_model.safetensors")
    record_start(tmp_path)
    batch = make_batch(random_samples(2, groups=4), step=2)
    write_batch(step_folder(tmp_path / "steps", 2), replace(batch, version=batch.version * 0 + 1))
    recipe = train(configured(tmp_path, model_name="Qwen/the-base"))

    first, second = (recipe.store.load(name) for name in recipe.store.names())
    begun = load_file(first.adapter / "adapter_model.safetensors")
    assert begun.keys() == given.keys() and all(torch.equal(begun[name], given[name]) for name in given)
    gone_on = load_file(second.adapter / "adapter_model.safetensors")
    assert any(not torch.equal(gone_on[name], given[name]) for name in given)
    proof = LogprobProbe.read(first.folder / "probe.safetensors", context_length=512)
    assert len(proof.policy) == 64 and abs(proof.policy - proof.base).max() > 0.1


@pytest.mark.parametrize("name", ["Qwen/the-base", "0731", None])
def test_an_adapter_names_its_base_never_a_place_of_this_machine(tmp_path: Path, name: str | None) -> None:
    give(tmp_path)
    record_start(tmp_path)
    recipe = train(configured(tmp_path, model_name=name))
    (folder,) = recipe.store.names()
    said = json.loads((recipe.store.load(folder).adapter / "adapter_config.json").read_text())
    assert said["base_model_name_or_path"] == (name or tiny_model().name), "also one that reads as a number"
    assert "/" not in said["base_model_name_or_path"].replace("Qwen/", "")


def test_g19_an_adapter_of_another_rank_fails_its_step_and_leaves_the_policy(tmp_path: Path) -> None:
    give(tmp_path, replace(LORA, rank=8))
    record_start(tmp_path)
    recipe = train(configured(tmp_path))
    failed = json.loads((step_folder(tmp_path / "steps", 1) / "failed.json").read_text())
    assert "rank 8" in failed["error"]
    assert recipe.store.names() == []
    with pytest.raises(PolicyError, match="rank 8"):
        recipe.policy.check_adapter(tmp_path / START)


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("content", [None, "{}", "{"])
def test_g19_an_adapter_that_cannot_be_read_fails_its_step_and_not_the_trainer(
    tmp_path: Path, file: str, content: str | None
) -> None:
    damaged = give(tmp_path) / file
    damaged.unlink() if content is None else damaged.write_text(content)
    record_start(tmp_path)
    recipe = train(configured(tmp_path))
    failed = json.loads((step_folder(tmp_path / "steps", 1) / "failed.json").read_text())
    assert "the adapter start cannot be read" in failed["error"] and recipe.store.names() == []


def test_a_recipe_that_an_older_run_has_left_gets_the_keys_that_came_since(tmp_path: Path) -> None:
    recipe = train(configured(tmp_path))
    older = OmegaConf.load(tmp_path / "recipe.yaml")
    assert isinstance(older, DictConfig)
    for key in ("base_model_name", "init_adapter", "dual_clip", "mismatch_cap", "schedule"):
        del older[key]
    older["learning_rate"] = 0.5
    found = with_defaults(older)
    recorded = {**recipe.settings.recorded, "learning_rate": 0.5}
    changed = recipe.settings.model_copy(update={"learning_rate": 0.5, "recorded": recorded})
    assert UpdateSettings.of(found) == changed
    assert found.init_adapter is None


def test_its_proof_is_what_the_policy_itself_finds_most_likely() -> None:
    policy = trained_policy()
    with torch.no_grad():
        for name, master in policy.master_weights.items():
            master.mul_(3 if ".lora_b." in name else 1)
    policy.refresh_working_copy()
    batch = fallback_probe_batch(policy)
    assert batch.tokens.tolist() == fallback_probe_batch(policy).tokens.tolist()
    found = compute_probe_logprobs(policy, batch)
    said = batch.sampled.astype(bool)
    assert len(found["tokens"]) == len(batch.tokens) and said.sum() == 64
    with policy.reference():
        assert batch.tokens.tolist() != fallback_probe_batch(policy).tokens.tolist(), (
            "it is the adapter's, not the base's"
        )


def test_what_an_adapter_on_a_model_looks_like_is_what_the_trainer_writes(tmp_path: Path) -> None:
    folder = give(tmp_path)
    config = json.loads((tiny_model() / "config.json").read_text())
    written = load_file(folder / "adapter_model.safetensors")
    of = shape(config)
    assert of is not None
    expected = tensor_shapes(of, LORA.rank)
    assert {name: list(tensor.shape) for name, tensor in written.items()} == expected
    said = json.loads((folder / "adapter_config.json").read_text())
    assert sorted(said["target_modules"]) == sorted(PROJECTIONS)
    assert portable_name(str(tiny_model())) == tiny_model().name
