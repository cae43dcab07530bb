"""What one run was asked to be, checked as far as it can be before anything starts.

Neighbours: `commands.py` hands in what was typed, `run.py` lives what comes out, `resume.py` has what a run
that is taken up was begun with. Knows nothing of machines or of what happens later.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.asking import preflight, quote, setting_sources
from launcher.base import credentials
from launcher.base.home import Home
from launcher.ledger.records import RecordStore
from launcher.run import resume
from launcher.run.resume import Resumed
from launcher.values.plan import Plan
from launcher.values.settings import Settings


@dataclass(frozen=True)
class Request:
    """`model_path` is a folder or a hub name; without a `command` the endpoint is held.

    `folder`: where the command runs, None for this one. `resumed`: the run that is taken up, None for a new.
    """

    settings: Settings
    plan: Plan
    model_path: str
    command: tuple[str, ...] = ()
    folder: Path | None = None
    resumed: Resumed | None = None


def check(
    flags: Mapping[str, Any],
    sets: tuple[str, ...],
    env_file: Path | None,
    command: tuple[str, ...],
    home: Home,
    resumed: Resumed | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Request:
    """Raises LaunchError for the first thing that cannot work; `say` gets remarks on prices."""
    settings = setting_sources.load(flags, sets, env_file, home=home)
    folder = None
    if resumed is not None:
        settings = resume.settings(settings, resumed.record)
        if not command and resumed.command:
            command, folder = resumed.command, resumed.folder
    quote.refuse_unasked(settings)
    rented = settings.gpus is not None
    if rented:
        preflight.check_tools()
    else:
        preflight.check_platform()
    if resumed is None:
        RecordStore(home).check_name(settings.name)
    preflight.check_command(_seen_from(folder, command), folder)
    preflight.check_names(command, folder)
    secrets = secret_values(settings)
    model_path = preflight.find_model(settings.model, secrets, here=not rented)
    _check_adapter(settings, model_path, secrets)
    if resumed is not None:
        _check_model(model_path, resumed, secrets)
    if settings.port is not None:
        preflight.check_port(settings.port, home)
    preflight.check_wandb(settings, os.environ)
    preflight.check_folders(home)
    preflight.check_disk(settings, model_path, home)
    plan = quote.make(settings, say)
    quote.refuse_without_account(plan)
    if not rented:
        # Last, because only this may ask the network.
        preflight.check_environment(home)
    return Request(settings, plan, model_path, command, folder, resumed)


def secret_values(settings: Settings) -> dict[str, str]:
    """The secrets of a run, to be handed to its runtime; they are hidden from all that is written."""
    credentials.hide_environment(os.environ)
    return {name: secret.value for name, secret in settings.secrets.items()}


def _check_adapter(settings: Settings, model_path: str, secrets: Mapping[str, str]) -> None:
    if settings.adapter is None:
        return
    from launcher.models import adapter_folder, hub, model_folder

    rank, alpha = (settings.values[f"train.lora.{name}"].value for name in ("rank", "alpha"))
    here = Path(model_path) / "config.json"
    base = model_folder.read_config(here) if here.is_file() else None
    if base is None:
        base = hub.config_of(model_path, os.environ, secrets.get("HF_TOKEN"))
    adapter_folder.check(settings.adapter, int(rank), float(alpha), base)


def _seen_from(folder: Path | None, command: tuple[str, ...]) -> tuple[str, ...]:
    """The command as this folder sees it: `./train.sh` of another one."""
    if folder is None or not command or os.sep not in command[0]:
        return command
    return (str(folder / command[0]), *command[1:])


def _check_model(model_path: str, resumed: Resumed, secrets: Mapping[str, str]) -> None:
    """The embedded model may have moved with the package; any other one is known by its place."""
    record = resumed.record
    was = record.details.get("settings", {}).get("model", model_path)
    if preflight.find_model(was, secrets) != model_path:
        raise resume.refused(record.name or record.id, f"the model {model_path}", str(was))
