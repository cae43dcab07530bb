"""Uploads a user's own model to a machine: only the files that are read, with progress; an interrupted upload
resumes.

Neighbours: `cloud_machine.py` calls this once the machine is known to have room, `remote_folder.py` is its
folder there, `machine_presence.py` tells whether it is worth trying again. A model of the hub is downloaded
by the machine itself. `uploads.py` does the copying. Knows nothing of models.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import runtime
from launcher.backends.ssh.machine_scripts import CODE, MODELS
from launcher.backends.ssh.remote_folder import RemoteFolder
from launcher.backends.ssh.rsync import Transfer
from launcher.backends.ssh.timer_reset import resetting_timer
from launcher.backends.ssh.uploads import Upload
from launcher.base import disk
from launcher.types.machine import Progress

# The files that the runtime reads in a model's folder; its subfolders hold the same weights in other forms.
FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")


def remote_path(model_path: str, user_home: str) -> str:
    """A model's path on a machine: a hub name stays one; an embedded model is beside the code; a user's
    folder has a place of its own."""
    package = Path(runtime.__file__).parent
    if not Path(model_path).is_absolute():
        return model_path
    if Path(model_path).is_relative_to(package):
        return f"{user_home}/{CODE}/runtime/{Path(model_path).relative_to(package)}"
    # An older rsync there takes a path with a blank for two.
    return f"{user_home}/{MODELS}/{re.sub(r'[^a-zA-Z0-9._-]', '-', Path(model_path).name)}"


def size_of(folder: Path) -> int:
    """The size of the upload in bytes."""
    return sum(path.stat().st_size for pattern in FILES for path in folder.glob(pattern) if path.is_file())


def upload(
    models: RemoteFolder, folder: Path, progress: Progress, on_disconnect: Callable[[], object] = lambda: None
) -> None:
    """Copy the model in `folder` to `models.there`. `on_disconnect` is called whenever the connection
    breaks, and may raise. Raises JobFailed, LaunchError."""
    size = size_of(folder)
    progress(f"copying the model, {disk.format_bytes(size)}")
    models.shell(f"umask 077 && mkdir -p {shlex.quote(models.there)}", "create the model's folder")
    copy = Transfer(size, lambda moved: progress(f"the model: {moved.describe()}"))
    words = ["-rtL", *(f"--include=/{pattern}" for pattern in FILES), "--exclude=*"]
    words += [f"{folder}/", f"{models.host.address}:{models.there}/"]
    upload = Upload("the model", "run it again with a larger --disk, or with a model from the hub")
    with resetting_timer(models.reset_timer, lambda: True):
        upload.run(models, words, copy, progress, on_disconnect)
