"""What one run was asked to be, checked as far as it can be before anything starts.

Neighbours: `commands.py` hands in what was typed, `run.py` lives what comes out.
Knows nothing of machines or of what happens later.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher import config, credentials, preflight
from launcher.home import Home
from launcher.plan import Plan, make_plan
from launcher.settings import Settings


@dataclass(frozen=True)
class Request:
    """`model_path` is a folder or a hub name; without a `command` the endpoint is held."""

    settings: Settings
    plan: Plan
    model_path: str
    command: tuple[str, ...] = ()


def check(
    flags: Mapping[str, Any],
    sets: tuple[str, ...],
    env_file: Path | None,
    command: tuple[str, ...],
    home: Home,
) -> Request:
    """Raises LaunchError for the first thing that cannot work."""
    settings = config.load(flags, sets, env_file, home=home)
    plan = make_plan(settings)
    preflight.check_platform()
    preflight.check_command(command)
    model_path = preflight.find_model(settings.model, secret_values(settings))
    if settings.port is not None:
        preflight.check_port(settings.port, home)
    preflight.check_wandb(settings, os.environ)
    preflight.check_folders(home)
    preflight.check_disk(settings, model_path, home)
    # Last, because only this may ask the network.
    preflight.check_environment(home)
    return Request(settings, plan, model_path, command)


def secret_values(settings: Settings) -> dict[str, str]:
    """The secrets of a run, to be handed to its runtime; they are hidden from all that is written."""
    credentials.hide_environment(os.environ)
    return {name: secret.value for name, secret in settings.secrets.items()}
