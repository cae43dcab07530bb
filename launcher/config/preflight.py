"""Checks before anything starts: the command, the model, folders, disk, accounts.

Neighbours: `run_request.py` asks all of it before a run, `doctor.py` some at any time; `ports.py` and
`remote_tools.py` look at the port and at ssh, `model_folder.py` and `hub.py` at models. Each check raises
PreflightError with its fix. Knows nothing of machines or of the runtime's processes; reads files.
"""

from __future__ import annotations

import netrc
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.base import disk, embedded_models
from launcher.base.errors import PreflightError
from launcher.base.home import Home
from launcher.base.suggestions import closest_match
from launcher.config import import_shadowing
from launcher.models import known_models, model_folder
from launcher.types.settings import Settings
from runtime.shared import model_shape

# Between a model that is not there and an embedded one.
_MIN_SIMILARITY = 0.8
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_PYTHON = re.compile(r"python[\d.]*")
# Logs, samples and batches of a run, beside its checkpoints.
_RUN_BYTES = 200 * 10**6


def check_platform() -> None:
    """A local run needs Linux: it ends its processes through death signals and subreapers."""
    if sys.platform != "linux":
        system = {"darwin": "macOS"}.get(sys.platform, sys.platform)
        raise PreflightError(
            f"a run on this computer needs Linux, this is {system}",
            "launch needs a Linux feature to end the run's processes if it is killed",
            "run the same command on a Linux computer, in a container or a virtual machine",
        )


def check_command(command: Sequence[str], folder: Path | None = None) -> None:
    """The program exists and may be run in `folder` (None: this one)."""
    if not command:
        return
    program = command[0]
    found = shutil.which(program) if program else None
    if found is None:
        raise PreflightError(f"cannot run {program or 'an empty command'}", *_not_runnable(command))
    if interpreter := _missing_interpreter(Path(found)):
        raise PreflightError(
            f"cannot run {program}", f"its first line names {interpreter}", f"head -1 {found}"
        )
    script = command[1] if len(command) > 1 and _PYTHON.fullmatch(Path(program).name) else ""
    place = folder or Path.cwd()
    if script.endswith(".py") and not (place / script).is_file():
        raise PreflightError(f"cannot run {script}", f"no such file in {place}", "ls *.py")


def check_import_shadowing(
    command: Sequence[str], folder: Path | None = None, *, arbor: bool = False
) -> None:
    """Raises PreflightError if a file beside the program would be imported instead of ours."""
    import_shadowing.refuse(command, folder or Path.cwd(), os.environ, arbor=arbor)


def _not_runnable(command: Sequence[str]) -> tuple[str, str]:
    """The reason `command[0]` cannot be run, and the command to type instead."""
    program = command[0]
    path = Path(program)
    if not program:
        return "the word after -- is empty", "launch -- python my.py"
    if path.is_dir():
        return "it is a folder", f"ls {program}"
    with_python = f"launch -- python {shlex.join(command)}"
    if os.sep in program and path.exists():
        hint = with_python if program.endswith(".py") else f"chmod +x {program}"
        return "it exists but is not executable", hint
    if path.exists():
        hint = with_python if program.endswith(".py") else f"launch -- ./{shlex.join(command)}"
        return "a file of that name is in this folder, but not on PATH", hint
    if os.sep in program:
        return "no such file", f"ls {path.parent}"
    return "no such program on PATH", f"which {program}"


def _missing_interpreter(program: Path) -> str | None:
    """The interpreter that a script's first line names, when it is not there."""
    try:
        with program.open("rb") as file:
            first = file.readline(256)
    except OSError:
        return None
    if not first.startswith(b"#!"):
        return None
    words = os.fsdecode(first[2:]).split()
    return words[0] + ", which does not exist" if words and not os.path.exists(words[0]) else None


# ------------------------------------------------------------------ the model


def find_model(
    model: str, secrets: Mapping[str, str] | None = None, *, here: bool = True, asks: bool = True
) -> str:
    """The model's folder, absolute, after the checks for serving and training; or its hub name unchanged,
    with a check for room unless it is not `here` that the model is downloaded. `asks`: whether the hub is
    asked about a model that is not here.
    """
    folder = embedded_models.folder_of(model)
    if folder.is_dir():
        folder = folder.absolute()
        model_folder.check(model, folder)
        return str(folder)
    looks_like_a_path = model.startswith((".", "/", "~")) or model.count("/") > 1
    if folder.exists() or looks_like_a_path or not _HUB_NAME.fullmatch(model):
        why = "no such folder, and not a hub name (owner/name)"
        why = "it is a file, not a folder" if folder.exists() else why
        meant = known_models.closest_model(model) or closest_match(
            model, embedded_models.NAMES, _MIN_SIMILARITY
        )
        why += f"; did you mean {meant}?" if meant else ""
        hint = f"launch --model {meant or 'Qwen/Qwen2.5-1.5B-Instruct'}"
        raise PreflightError(f"no model {model}", why, hint)
    from launcher.models import hub

    if asks:
        hub.check(model, os.environ, (secrets or {}).get("HF_TOKEN"), here=here)
    else:
        hub.check_downloaded(model, os.environ)
    return model


# ------------------------------------------------------------------ this computer


def check_folders(home: Home) -> None:
    """The home can be written, and so can the folder of the runtime's sockets. Creates nothing."""
    for folder in (home.runs, home.environments):
        if trouble := disk.why_unwritable(folder):
            hint = "set LAUNCH_HOME to a folder of yours"
            raise PreflightError(f"cannot write under {folder}", trouble, hint)
    temporary = Path(tempfile.gettempdir())
    if trouble := disk.why_unwritable(temporary):
        raise PreflightError(f"cannot write under {temporary}", trouble, "set TMPDIR to a folder of yours")


def check_disk(settings: Settings, model_path: str, home: Home) -> None:
    """Space for the run's files: checkpoints of the chosen size, and a model still to download."""
    needed = _RUN_BYTES + checkpoints_bytes(settings, model_path)
    keep = settings.values["train.keep_checkpoints"].value
    free = disk.free_bytes(home.runs)
    if free < needed:
        raise PreflightError(
            f"a run with {keep} checkpoints needs {disk.format_bytes(needed)} of disk",
            f"{disk.format_bytes(free)} are free at {home.runs}",
            "free some space, or set LAUNCH_HOME to a folder on a larger disk",
        )


def checkpoints_bytes(settings: Settings, model_path: str) -> int:
    """The most the checkpoints take: the kept ones, one in progress, and the downloaded adapters."""
    config = Path(model_path) / "config.json"
    if not config.is_file():
        return 0
    found = model_shape.shape(model_folder.read_config(config))
    if found is None:
        return 0
    from launcher.config import runtime_config

    lora = runtime_config.user_values(settings.runtime).train.lora
    one = model_folder.checkpoint_bytes(found, lora.rank, lora.target_modules)
    return one * (int(settings.values["train.keep_checkpoints"].value) + 2)


def check_runtime_environment(home: Home, variant: str = "cpu") -> None:
    """The runtime's environment is built, or can be: disk, and a package index that answers."""
    from launcher.backends import environments
    from runtime import bootstrap

    if bootstrap.is_ready(home.environments, variant):
        return
    needed = bootstrap.NEEDED_BYTES[variant]
    free = disk.free_bytes(home.environments)
    if free < needed:
        raise PreflightError(
            f"the runtime's environment needs {disk.format_bytes(needed)} of disk",
            f"{disk.format_bytes(free)} are free at {home.environments}",
            "free some space, or set LAUNCH_HOME to a folder on a larger disk",
        )
    try:
        trouble = environments.why_unreachable(variant)
    except bootstrap.BootstrapError as error:
        raise PreflightError(
            "the runtime's environment cannot be built", str(error), "pip install uv"
        ) from None
    if trouble:
        raise PreflightError(
            "the runtime's environment is not built, and its packages cannot be downloaded",
            trouble.splitlines()[0],
            "connect to the network for the first run; once the environment is built, launch works offline",
        )


def check_wandb(settings: Settings, environ: Mapping[str, str]) -> None:
    """Online logging has an account to log to."""
    if settings.wandb != "online" or has_wandb_account(settings.secrets, environ):
        return
    raise PreflightError(
        "--wandb online: no account",
        "WANDB_API_KEY is not set, in .env or elsewhere",
        "launch --wandb offline",
    )


def has_wandb_account(secrets: Mapping[str, object], environ: Mapping[str, str]) -> bool:
    """Whether there is a key for Weights & Biases, or a server of the user's own that may need none."""
    if "WANDB_API_KEY" in secrets or environ.get("WANDB_BASE_URL"):
        return True
    try:
        return netrc.netrc().authenticators("api.wandb.ai") is not None
    except (OSError, netrc.NetrcParseError):
        return False
