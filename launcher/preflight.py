"""What can be known to fail before anything starts: the command, the model, the port, an account.

Neighbours: `run.py` asks first. Each check raises PreflightError with its fix.
Knows nothing of machines or of the runtime's processes; reads files, and binds a port only to let it go.
"""

from __future__ import annotations

import errno
import json
import netrc
import os
import re
import shutil
import socket
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import runtime
from launcher.errors import PreflightError
from launcher.settings import TINY_MODEL, Settings

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HEADER_LIMIT = 100_000_000  # bytes; the safetensors format's own bound on its header


def check_command(command: Sequence[str]) -> None:
    """The program exists and may be run."""
    if not command:
        return
    program = command[0]
    if shutil.which(program):
        return
    if os.sep in program and Path(program).exists():
        what, hint = "it is there but may not be run", f"chmod +x {program}"
        if program.endswith(".py"):
            hint = f"launch -- python {' '.join(command)}"
    elif Path(program).exists():
        what = "a file of that name is in this folder, but not on PATH"
        hint = (
            f"launch -- python {' '.join(command)}" if program.endswith(".py") else f"launch -- ./{program}"
        )
    else:
        what, hint = "no such program on PATH", f"which {program}"
    raise PreflightError(f"cannot run {program}", what, hint)


def find_model(model: str) -> str:
    """The model's folder, absolute, checked for what serving and training need; or its hub name as it is."""
    if model == TINY_MODEL:
        folder = Path(runtime.__file__).parent / "tiny" / "model"
        _check_model_folder(model, folder)
        return str(folder)
    folder = Path(model).expanduser()
    if folder.is_dir():
        folder = folder.absolute()
        _check_model_folder(model, folder)
        return str(folder)
    looks_like_a_path = model.startswith((".", "/", "~")) or model.count("/") > 1
    if folder.exists() or looks_like_a_path or not _HUB_NAME.fullmatch(model):
        why = "no such folder, and not a hub name (owner/name)"
        why = "it is a file, not a folder" if folder.exists() else why
        raise PreflightError(f"no model {model}", why, "launch --model Qwen/Qwen2.5-1.5B-Instruct")
    return model


def check_port(port: int) -> None:
    """Nobody listens on this port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            why = "another program listens there" if error.errno == errno.EADDRINUSE else error.strerror
            raise PreflightError(
                f"port {port} is taken", why, "launch   (without --port: 7453, or the next free one)"
            ) from None


def check_wandb(settings: Settings, environ: Mapping[str, str]) -> None:
    """Online logging has an account to log to."""
    if settings.wandb != "online" or "WANDB_API_KEY" in settings.secrets:
        return
    try:
        known = netrc.netrc().authenticators("api.wandb.ai") is not None
    except (OSError, netrc.NetrcParseError):
        known = False
    if not known and not environ.get("WANDB_BASE_URL"):
        raise PreflightError(
            "--wandb online: no account",
            "WANDB_API_KEY is not set, in .env or elsewhere",
            "launch --wandb offline",
        )


# ------------------------------------------------------------------ a model's folder


class _UnusableError(Exception):
    """Why a folder is not a model that can be served and trained, and what to do about it."""

    def __init__(self, why: str, hint: str | None = None) -> None:
        super().__init__(why)
        self.why = why
        self.hint = hint


def _check_model_folder(model: str, folder: Path) -> None:
    try:
        _check_model_config(folder / "config.json")
        for name in _weight_files(folder):
            if reason := _broken_safetensors(folder / name):
                raise _UnusableError(f"{folder / name}: {reason}", "copy or download the model again")
        if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
            raise _UnusableError(f"no tokenizer in {folder}")
        if not _has_chat_template(folder):
            raise _UnusableError(
                "its tokenizer has no chat template", "launch --model MODEL, an instruct model that has one"
            )
    except _UnusableError as unusable:
        hint = unusable.hint or f"ls -l {folder}"
        raise PreflightError(f"the model {model} cannot be used", unusable.why, hint) from None


def _check_model_config(path: Path) -> None:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise _UnusableError(f"no config.json in {path.parent}") from None
    except (ValueError, OSError) as error:
        raise _UnusableError(f"{path}: {error}") from None
    if not isinstance(config, dict):
        raise _UnusableError(f"{path} is not a model's configuration")


def _weight_files(folder: Path) -> list[str]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _UnusableError(f"{index}: {error}") from None
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if not names:
        raise _UnusableError(f"no *.safetensors in {folder}; other weight formats are not read")
    return names


def _broken_safetensors(path: Path) -> str | None:
    """Why the file cannot be whole, from its header alone; None when its lengths agree."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else _HEADER_LIMIT + 1
            if length > min(_HEADER_LIMIT, size):
                return "not a safetensors file, or cut short"
            header = json.loads(file.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except FileNotFoundError:
        return "named in the index, but not there"
    except OSError as error:
        return error.strerror
    except (ValueError, KeyError, TypeError, AttributeError):
        return "its header is damaged"
    whole = 8 + length + max(ends, default=0)
    return None if size == whole else f"cut short: {size} bytes of {whole}"


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").exists() or (folder / "chat_template.json").exists():
        return True
    try:
        return bool(
            json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("chat_template")
        )
    except (OSError, ValueError, AttributeError):
        return False
