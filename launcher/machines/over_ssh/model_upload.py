"""A user's own model, brought to a machine: what is read of it, with progress, going on where it broke off.

Neighbours: `cloud.py` calls this once the machine is known to have room, `remote_folder.py` is its folder
there, `still_there.py` says whether it is worth trying again. A model of the hub is downloaded by the machine
itself. `rsync.py` does the copying: what is there, whole or in part, is not sent again. Knows nothing of
models.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import runtime
from launcher.base import disk
from launcher.base.errors import JobFailed, LaunchError
from launcher.base.log import LOGGER
from launcher.machines.over_ssh import rsync
from launcher.machines.over_ssh.link import run_on
from launcher.machines.over_ssh.machine_scripts import CODE, MODELS
from launcher.machines.over_ssh.remote_folder import SSH_BY_FILE, RemoteFolder
from launcher.machines.over_ssh.rsync import Copy, RsyncError
from launcher.values.machine import Progress

# What the runtime reads of a model's folder; its subfolders hold other forms of the same.
FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")
# The least patience with a line that breaks again and again.
_LEAST_SECONDS = 900.0
_PAUSE_SECONDS = 3.0
# The machine's own timer may be armed with a minute.
_RENEW_EVERY_SECONDS = 15.0


def place(model_path: str, user_home: str) -> str:
    """Where a run's model is on a machine: a hub name is one there as well; the model that comes with the
    runtime is where its code is; a folder of the user's has a place of its own."""
    package = Path(runtime.__file__).parent
    if not Path(model_path).is_absolute():
        return model_path
    if Path(model_path).is_relative_to(package):
        return f"{user_home}/{CODE}/runtime/{Path(model_path).relative_to(package)}"
    # An older rsync there takes a path with a blank for two.
    return f"{user_home}/{MODELS}/{re.sub(r'[^a-zA-Z0-9._-]', '-', Path(model_path).name)}"


def size_of(folder: Path) -> int:
    """Bytes of what would be brought."""
    return sum(path.stat().st_size for pattern in FILES for path in folder.glob(pattern) if path.is_file())


def bring(
    models: RemoteFolder, folder: Path, progress: Progress, if_lost: Callable[[], object] = lambda: None
) -> None:
    """Copy the model in `folder` to `models.there`. `if_lost` is asked whenever the connection breaks, and
    may raise. Raises JobFailed, LaunchError."""
    size = size_of(folder)
    bound = time.monotonic() + max(_LEAST_SECONDS, size / rsync.SLOWEST_BYTES_PER_SECOND)
    progress(f"copying the model, {disk.in_units(size)}")
    models.shell(f"umask 077 && mkdir -p {shlex.quote(models.there)}", "create the model's folder")
    copy = Copy(size, lambda moved: progress(f"the model: {moved.describe()}"))
    with _setting_timer_back(models):
        while (trouble := _attempt(models, folder, copy)) is not None:
            if_lost()
            if time.monotonic() > bound:
                raise _failed(
                    f"took longer than even a slow connection needs for {disk.in_units(size)}", trouble
                )
            progress(f"the connection broke, continuing: {trouble}")
            time.sleep(_PAUSE_SECONDS)


def _attempt(models: RemoteFolder, folder: Path, copy: Copy) -> str | None:
    """One rsync; None when all is there, else how the connection broke. Raises JobFailed for all else."""
    words = ["-rtL", "-e", SSH_BY_FILE, *(f"--include=/{pattern}" for pattern in FILES), "--exclude=*"]
    words += [f"{folder}/", f"{models.host.address}:{models.there}/"]
    try:
        rsync.run(words, models.keep_ssh(), copy)
    except RsyncError as error:
        if error.lost:
            return error.why
        raise _failed("could not be copied", error.why) from error
    except FileNotFoundError:
        raise JobFailed("copying needs rsync", "it is not on this computer", "launch doctor") from None
    return None


def _failed(how: str, why: str) -> JobFailed:
    return JobFailed(
        f"the model {how}", why, "run it again with a larger --disk, or with a model from the hub"
    )


@contextlib.contextmanager
def _setting_timer_back(models: RemoteFolder) -> Iterator[None]:
    """Who copies is alive: the machine's own timer is set back meanwhile."""
    over = threading.Event()

    def renew() -> None:
        while not over.wait(_RENEW_EVERY_SECONDS):
            try:
                run_on(models.host, f"cd ~/{CODE} && python3 -m runtime.autodown", bound_seconds=30)
            except LaunchError as error:
                LOGGER.warning("the machine's idle timer was not reset: %s (%s)", error.message, error.why)

    thread = threading.Thread(target=renew, name="upload-timer-setback", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
