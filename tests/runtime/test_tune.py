"""The way the trainer is started: torchtune's own command, without what no recipe here uses."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from runtime.recipes.command import RECIPES, recipe_keys, trainer_command
from runtime.recipes.grpo_lora import with_defaults
from runtime.recipes.tune import SkippedModule
from runtime.shared.runtime_config import RuntimeConfig
from runtime.shared.step_settings import SettingsError, run_settings
from runtime.shared.train_config import LoraConfig, TrainConfig, per_step_settings, use_of
from runtime.shared.train_kwargs.mapped import MAPPED
from tests.support.environment import PROGRAMS, REPOSITORY, runtime_environ


def test_what_is_left_out_can_be_named_but_not_used() -> None:
    module = SkippedModule("datasets")
    load = module.load_dataset
    with pytest.raises(ImportError, match=r"datasets\.load_dataset is left out"):
        load("a", split="train")
    assert not hasattr(module, "__file__"), "the import system asks for such names itself"


def test_each_process_of_a_trainer_is_asked_for_and_every_setting_is_a_key() -> None:
    config = RuntimeConfig(run_id="r", model_path="m", state_dir="/s", socket_dir="/t", train_processes=4)
    command = trainer_command(config, follow=False)
    assert command[:6] == [sys.executable, "-m", "runtime.recipes.tune", "run", "--nproc_per_node", "4"]
    keys = dict(word.split("=", 1) for word in command if "=" in word)
    settings = set(type(config.train).model_fields) - {"lora"} | {
        f"lora_{key}" for key in type(config.train.lora).model_fields
    }
    assert settings <= keys.keys()


@pytest.mark.parametrize("name", ["0731", "null", "1e3", 'lr=1e-4 "best" é', "Qwen/Qwen2.5-0.5B"])
def test_a_name_arrives_as_it_is_whatever_it_reads_as(name: str) -> None:
    config = RuntimeConfig(run_id="r", model_path="m", model_name=name, state_dir=f"/{name}", socket_dir="/t")
    words = [word for word in trainer_command(config) if "=" in word]
    assert all(word.count("=") == 1 for word in words), "torchtune refuses another"
    found = OmegaConf.from_dotlist(words)
    assert (found.base_model_name, found.output_dir) == (name, f"/{name}")
    assert (found.constant_tokens, found.follow, found.lora_rank) == (None, True, 16)


def test_the_recipes_keys_are_its_own_file_and_the_training_settings_for_a_run_and_for_plain_tune() -> None:
    recipe = OmegaConf.load(RECIPES / "configs" / "grpo_lora.yaml")
    assert isinstance(recipe, DictConfig)
    config = RuntimeConfig(run_id="r", model_path="m", state_dir="/s", socket_dir="/t")
    given = {word.partition("=")[0] for word in trainer_command(config) if "=" in word}
    settings = recipe_keys(TrainConfig()).keys()
    assert not settings & set(recipe), "each is written once"
    assert set(recipe) | settings == given | {"threads"}, "of a run it is the machine's own affair"
    assert run_settings(with_defaults(recipe)) == TrainConfig()
    changed = with_defaults(DictConfig({"loss": "dapo", "lora_target_modules": ["q_proj"], "lora_rank": 8}))
    lora = LoraConfig(rank=8, target_modules=("q_proj",))
    assert run_settings(changed) == TrainConfig(loss="dapo", lora=lora)


@pytest.mark.parametrize(
    ("key", "value"), [("lora_rank", 300), ("lora_target_modules", ["lm_head"]), ("seed", "x")]
)
def test_a_recipes_key_that_does_not_fit_is_named_as_it_was_written(key: str, value: object) -> None:
    with pytest.raises(SettingsError, match=re.escape(f"{key}={value} does not fit")):
        run_settings({key: value})


def test_every_setting_of_a_step_is_a_keyword_of_a_training_and_a_dependence_is_on_a_setting() -> None:
    """A new setting is one line of the table."""
    assert set(per_step_settings()) <= MAPPED.keys()
    for name in TrainConfig.model_fields:
        assert set(use_of(TrainConfig, name).belongs_to) <= TrainConfig.model_fields.keys()


@pytest.mark.slow
def test_the_command_is_torchtunes_and_loads_no_data_set_library() -> None:
    done = subprocess.run(
        [sys.executable, PROGRAMS / "runtime" / "what_tune_loads.py", "run", "nothing"],
        env=runtime_environ(),
        capture_output=True,
        text=True,
    )
    assert "The '--config' argument is required" in done.stderr, done.stderr
    assert done.stdout.splitlines()[-2:] == ["2", "['datasets', 'torchtune']"]


_RECIPE = """
import atexit, json, os, sys

class Torn:
    def __del__(self, write=os.write):
        write(1, b"taken apart\\n")

json.torn = Torn()
atexit.register(os.write, 1, b"told\\n")
sys.exit(%r)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("ends", "code", "says"), [(None, 0, ["told"]), (3, 3, ["told", "taken apart"])])
def test_a_recipe_that_ended_well_leaves_at_once_and_tells_who_asked(
    tmp_path: Path, ends: int | None, code: int, says: list[str]
) -> None:
    (tmp_path / "ending_recipe.py").write_text(_RECIPE % ends)
    (tmp_path / "own.yaml").write_text("device: cpu\n")
    environ = runtime_environ()
    done = subprocess.run(
        [sys.executable, "-m", "runtime.recipes.tune", "run", "ending_recipe.py", "--config", "own.yaml"],
        cwd=tmp_path,
        env=environ | {"PYTHONPATH": f"{REPOSITORY}:{tmp_path}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stderr
    assert done.stdout.splitlines() == says, done.stderr
