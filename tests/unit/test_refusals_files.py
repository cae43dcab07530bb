"""What is wrong in a file that settings are read from, in the environment, or in a home: refused with 3."""

# ruff: noqa: E501 - tables: a line is a case
from __future__ import annotations

import os

import pytest

from launcher.base.home import Home
from launcher.results import trackio_process
from tests.support.refusals import Place, Refused, check, place

__all__ = ["place"]

pytestmark = pytest.mark.process

FILES = [
    Refused("up", 3, "launch.toml: lerning_rate: no such", "did you mean train.learning_rate?", "launch.toml: train",
            done=lambda place: place.write("launch.toml", "lerning_rate = 1")),
    Refused("up", 3, "launch.toml: 'no' is not valid", "90s, 15m, 4h", "launch --help",
            done=lambda place: place.write("launch.toml", "max = 'no'")),
    Refused("up", 3, "launch.toml: train.lora.rank: 'many' is not valid", "a whole number from 1", "launch config",
            done=lambda place: place.write("launch.toml", "[train.lora]\nrank = 'many'")),
    Refused("up", 3, "launch.toml cannot be read", "Invalid value", "correct",
            done=lambda place: place.write("launch.toml", "model = ")),
    Refused("up", 3, "launch.toml cannot be read", "Is a directory", "ls -l",
            done=lambda place: (place.folder / "launch.toml").mkdir()),
    Refused("up", 3, "config.toml: modle: no such setting", "did you mean model?", "config.toml: model",
            done=lambda place: place.user_config("modle = 'x'")),
    Refused("up", 3, "LAUNCH_BUDGET: 'lots' is not valid", "US dollars", "launch --help",
            environ={"LAUNCH_BUDGET": "lots"}),
    Refused("up", 3, "LAUNCH_MODELS in the environment: no such setting", "LAUNCH_MODEL", "export LAUNCH_MODEL=",
            environ={"LAUNCH_MODELS": "x"}),
    Refused("up", 3, ".env: line 3 cannot be read", "NAME=value", "sed -n 3p",
            done=lambda place: place.write(".env", "A=1\n\nHF_TOKEN hf_not_to_be_shown\n")),
    Refused("up", 3, ".env: line 1 cannot be read", "NAME=value", "sed -n 1p",
            done=lambda place: place.write(".env", "HF_TOKEN\n")),
    Refused("up", 3, ".env: line 2 cannot be read", "NAME=value", "sed -n 2p",
            done=lambda place: place.write(".env", "A=1\nHF_TOKEN='no end\n")),
    Refused("up", 3, ".env: LAUNCH_LEASE: '1' is not valid", "90s, 15m, 4h", "launch --help",
            done=lambda place: place.write(".env", "LAUNCH_LEASE=1\n")),
    Refused("--env-file none", 3, "no file none", "named by --env-file", "ls -l none"),
    Refused("--env-file .", 3, ". cannot be read", "Is a directory", "ls -ld"),
    Refused("up", 3, "cannot write under", "is not a folder", "set LAUNCH_HOME",
            done=lambda place: place.home.write_text("")),
    Refused("up", 3, "config.toml cannot be read", "name too long", "ls -l", environ={"LAUNCH_HOME": "/tmp/" + "x" * 300}),
    Refused("up", 3, "cannot write under", "read-only disk", "set LAUNCH_HOME",
            done=lambda place: place.patch.setattr(os, "ST_RDONLY", ~0)),
    Refused("--wandb online", 3, "--wandb online: no account", "WANDB_API_KEY", "launch --wandb offline",
            environ={"HOME": "/nowhere", "WANDB_API_KEY": "", "NETRC": ""}),
    Refused("--trackio", 3, "--trackio needs Trackio 9.9", "0.43.0 is installed", "uv pip install --python",
            done=lambda place: place.patch.setattr(trackio_process, "_VERSION", "9.9")),
    Refused("--trackio", 3, "--trackio needs Trackio 0.43", "not installed in launch's environment", "'trackio==0.43.*'",
            done=lambda place: place.patch.setattr(trackio_process, "_PACKAGE", "trackio-that-is-not-there")),
]  # fmt: skip


@pytest.mark.parametrize("refused", FILES, ids=lambda refused: refused.what)
def test_what_is_wrong_in_a_file_or_the_environment_is_3(refused: Refused, place: Place) -> None:
    check(refused, place)
    assert "not_to_be_shown" not in place.typed(*refused.typed.split(), **refused.environ).stderr


def test_what_a_file_says_of_rented_runs_waits_for_one(place: Place) -> None:
    place.write("launch.toml", "budget = 5\nidle = '10m'")
    assert place.typed("plan").returncode == 0


def test_an_env_file_that_others_can_read_is_a_warning_and_no_error(place: Place) -> None:
    from launcher.config.setting_sources import load

    for text, mode, warned in [
        ("HF_TOKEN=hf_0123456789\n", 0o644, True),
        ("HF_TOKEN=hf_0123456789\n", 0o600, False),
        ("LAUNCH_LEASE=5m\nHF_TOKEN=\n", 0o644, False),
    ]:
        place.write(".env", text, mode)
        home = Home.find({"LAUNCH_HOME": str(place.home)})
        warnings = load({}, environ={}, folder=place.folder, home=home).warnings
        assert warnings == (
            (f".env holds secrets and other users can read it: chmod 600 {place.folder}/.env",)
            if warned
            else ()
        )
