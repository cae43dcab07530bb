"""launcher/config/setting_sources.py: precedence, sources, and keys nobody knows."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.base.errors import ConfigError, LaunchError, UsageError
from launcher.base.home import Home
from launcher.config import setting_sources
from launcher.config.setting_sources import load


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "data", tmp_path / "config", tmp_path / "cache")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "project"
    path.mkdir()
    return path


def write_user_config(home: Home, text: str) -> None:
    home.config.mkdir(parents=True)
    home.user_config.write_text(text)


def test_each_source_wins_over_the_next_and_is_named(home: Home, folder: Path) -> None:
    flags: dict[str, str] = {}
    environ: dict[str, str] = {}

    def lease() -> tuple[float, str]:
        value = load(flags, environ=environ, folder=folder, home=home).values["lease"]
        return value.value, value.source

    assert lease() == (900.0, "default")
    write_user_config(home, 'lease = "1m"')
    assert lease() == (60.0, str(home.user_config))
    (folder / "launch.toml").write_text('lease = "2m"')
    assert lease() == (120.0, "launch.toml")
    (folder / ".env").write_text("LAUNCH_LEASE=3m\n")
    assert lease() == (180.0, ".env: LAUNCH_LEASE")
    environ["LAUNCH_LEASE"] = "4m"
    assert lease() == (240.0, "LAUNCH_LEASE")
    flags["lease"] = "5m"
    assert lease() == (300.0, "--lease")


def test_runtime_settings_follow_the_same_order(home: Home, folder: Path) -> None:
    (folder / "launch.toml").write_text(
        "[train]\nlearning_rate = 1e-3\nlora.rank = 8\n[engine]\nmax_loras = 6\n"
    )
    environ = {"LAUNCH_TRAIN__LORA__RANK": "4"}
    flags = {"model": "someone/some-model"}
    settings = load(flags, ("train.learning_rate=2e-3",), environ=environ, folder=folder, home=home)
    assert settings.runtime == {"train.learning_rate": "2e-3", "train.lora.rank": "4", "engine.max_loras": 6}
    assert settings.values["train.learning_rate"].source == "--set train.learning_rate"
    assert settings.values["train.lora.rank"].source == "LAUNCH_TRAIN__LORA__RANK"
    assert settings.values["engine.max_loras"].source == "launch.toml"
    assert settings.values["train.seed"].source == "default"


def failure(home: Home, folder: Path, **kwargs: object) -> LaunchError:
    sets = kwargs.pop("sets", ())
    flags = kwargs.pop("flags", {})
    environ = kwargs.pop("environ", {})
    with pytest.raises(LaunchError) as caught:
        load(flags, sets, environ=environ, folder=folder, home=home, **kwargs)  # type: ignore[arg-type]
    return caught.value


def test_an_unknown_key_is_an_error_with_a_suggestion(home: Home, folder: Path) -> None:
    (folder / "launch.toml").write_text('modle = "x"')
    error = failure(home, folder)
    assert isinstance(error, ConfigError) and error.exit_code == 3
    assert error.message == "launch.toml: modle: no such setting"
    assert error.why == "did you mean model?"

    (folder / "launch.toml").write_text("[train]\nlerning_rate = 1.0")
    assert failure(home, folder).why == "did you mean train.learning_rate?"

    (folder / "launch.toml").write_text("[cluster]\nzebra = 1.0")
    assert failure(home, folder).hint == "launch config"


def test_set_suggests_the_full_key_when_its_room_was_left_out(home: Home, folder: Path) -> None:
    error = failure(home, folder, sets=("learning_rate=2e-3",))
    assert isinstance(error, UsageError) and error.exit_code == 2
    assert error.hint == "launch --set train.learning_rate=2e-3"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("train.lr", "train.learning_rate"),
        ("lr", "train.learning_rate"),
        ("train.lora_alpha", "train.lora.alpha"),
        ("train.beta", "train.kl_beta"),
        ("engine.learning_rate", "train.learning_rate"),
        ("train.lerning_rate", "train.learning_rate"),
        ("engine.max_model_length", "engine.max_model_len"),
        ("train.init_adapter", None),
        ("train.zebra", None),
    ],
)
def test_a_key_that_is_proposed_is_the_one_that_was_meant(
    home: Home, folder: Path, typed: str, meant: str | None
) -> None:
    error = failure(home, folder, sets=(f"{typed}=1",))
    assert error.hint == (f"launch --set {meant}=1" if meant else "launch config")


def test_every_other_name_for_a_key_is_one_of_ours(home: Home, folder: Path) -> None:
    known = {key.rpartition(".")[2] for key in load({}, environ={}, folder=folder, home=home).values}
    assert set(setting_sources._ALIASES.values()) <= known
    assert not set(setting_sources._ALIASES) & known


def test_one_gpu_needs_no_count(home: Home, folder: Path) -> None:
    for typed, gpus in (("H100", "H100:1"), ("A100-80GB", "A100-80GB:1"), ("H100:4", "H100:4")):
        found = load({"gpus": typed}, environ={}, folder=folder, home=home)
        assert found.gpus == gpus and found.rented and not found.own_gpus


def test_gpus_called_local_are_this_computers_own(home: Home, folder: Path) -> None:
    for typed, gpus in (("local", "local:1"), ("Local:2", "local:2")):
        found = load({"gpus": typed}, environ={}, folder=folder, home=home)
        assert found.gpus == gpus and found.own_gpus and not found.rented
    assert not load({}, environ={}, folder=folder, home=home).own_gpus
    assert load({"gpus": "localized:1"}, environ={}, folder=folder, home=home).rented


def test_set_refuses_what_launch_decides_itself(home: Home, folder: Path) -> None:
    assert "launch sets this itself" in failure(home, folder, sets=("state_dir=/tmp/x",)).message


def test_set_points_to_the_option_that_exists(home: Home, folder: Path) -> None:
    assert failure(home, folder, sets=("lease=4m",)).hint == "launch --lease 4m"


def test_set_without_a_value_is_refused(home: Home, folder: Path) -> None:
    assert "no value" in failure(home, folder, sets=("train.seed",)).message


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("train.learning_rate=fast", "expected a number above 0"),
        ("train.lora.rank=0", "expected a whole number from 1 to 256"),
        ("train.loss=magic", "expected one of grpo"),
        ("train.learning_rate=inf", "expected a number above 0"),
        ("train.scale_rewards=perhaps", "expected true or false"),
        ("engine.max_model_len=8", "expected a whole number of 64 or more or none"),
        ("train.learning_rate=none", "expected a number above 0"),
    ],
)
def test_a_runtime_value_is_checked_before_anything_starts(
    home: Home, folder: Path, text: str, reason: str
) -> None:
    error = failure(home, folder, sets=(text,))
    assert error.exit_code == 2
    assert reason in (error.why or "")


@pytest.mark.parametrize(
    ("sets", "message", "reason"),
    [
        (("train.loss=gspo", "train.normaliser=token"), "--set train.normaliser: 'token'", "whole answers"),
        (("train.normaliser=sequence", "train.loss=dr_grpo"), "--set train.normaliser", "loss=grpo has it"),
        (("train.overlong=soft",), "--set train.overlong: 'soft'", "train.overlong_tokens"),
    ],
)
def test_runtime_values_that_mean_nothing_beside_one_another_are_refused(
    home: Home, folder: Path, sets: tuple[str, ...], message: str, reason: str
) -> None:
    error = failure(home, folder, sets=sets)
    assert error.exit_code == 2
    assert error.message.startswith(message) and error.message.endswith("is not valid")
    assert reason in (error.why or "") and error.hint


def test_values_that_need_one_another_are_taken_together(home: Home, folder: Path) -> None:
    sets = ("train.overlong=soft", "train.loss=dapo", "train.overlong_tokens=400", "train.scale_rewards=no")
    settings = load({}, sets, environ={}, folder=folder, home=home)
    assert settings.runtime["train.overlong_tokens"] == "400"


def test_none_clears_an_optional_runtime_value(home: Home, folder: Path) -> None:
    settings = load({}, ("engine.max_model_len=none",), environ={}, folder=folder, home=home)
    assert settings.runtime["engine.max_model_len"] is None


def test_the_embedded_model_brings_settings_that_anyone_may_change(home: Home, folder: Path) -> None:
    key = "train.learning_rate"
    assert load({}, environ={}, folder=folder, home=home).values[key].source == "the built-in model"
    other = load({"model": "someone/some-model"}, environ={}, folder=folder, home=home)
    assert other.values[key].source == "default"
    write_user_config(home, "[train]\nlearning_rate = 1e-4")
    assert load({}, environ={}, folder=folder, home=home).values[key].source == str(home.user_config)


def test_a_bad_value_names_its_place_and_gets_that_places_exit_code(home: Home, folder: Path) -> None:
    error = failure(home, folder, flags={"max": "4"})
    assert (error.exit_code, error.message) == (2, "--max: '4' is not valid")
    assert "4h" in (error.why or "")
    error = failure(home, folder, environ={"LAUNCH_BUDGET": "lots"})
    assert (error.exit_code, error.message) == (3, "LAUNCH_BUDGET: 'lots' is not valid")


def test_a_misspelt_variable_is_an_error_and_a_foreign_one_is_not(home: Home, folder: Path) -> None:
    load({}, environ={"LAUNCH_EDITOR": "code", "LAUNCHER": "x"}, folder=folder, home=home)
    assert failure(home, folder, environ={"LAUNCH_MODELS": "x"}).why == "did you mean LAUNCH_MODEL?"


def test_inside_a_run_launch_model_names_the_endpoints_model_not_ours(home: Home, folder: Path) -> None:
    environ = {"LAUNCH_MODEL": "policy", "LAUNCH_RUN_ID": "slip-00000000", "LAUNCH_API_KEY": "x"}
    assert (
        load({}, environ=environ, folder=folder, home=home).model == setting_sources.SETTINGS["model"].default
    )


def test_a_file_that_is_not_toml_says_where(home: Home, folder: Path) -> None:
    (folder / "launch.toml").write_text("model = ")
    assert "Invalid value" in (failure(home, folder).why or "")


def test_a_missing_env_file_is_an_error_only_when_it_was_named(home: Home, folder: Path) -> None:
    load({}, environ={}, folder=folder, home=home)
    assert failure(home, folder, env_file=folder / "secrets").exit_code == 3


def test_secrets_come_from_the_environment_before_dotenv(home: Home, folder: Path) -> None:
    (folder / ".env").write_text("WANDB_API_KEY=from-file\nHF_TOKEN=hf\nOPENAI_API_KEY=not-ours\n")
    secrets = load({}, environ={"WANDB_API_KEY": "from-env"}, folder=folder, home=home).secrets
    assert {name: value.value for name, value in secrets.items()} == {
        "WANDB_API_KEY": "from-env",
        "HF_TOKEN": "hf",
    }


def test_launch_home_overrides_every_folder(tmp_path: Path) -> None:
    home = Home.find({"LAUNCH_HOME": str(tmp_path)})
    assert home.runs == tmp_path / "runs"
    assert home.user_config == tmp_path / "config.toml"
    assert home.cache.is_relative_to(tmp_path)
