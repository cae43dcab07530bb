"""A user's own model, brought to a machine: what is read of it, with progress, going on where it broke off.

Neighbours: `cloud.py` calls this once the machine is known to have room, `remote.py` is its folder there,
`presence.py` says whether it is worth trying again. A model of the hub is downloaded by the machine itself.
rsync does the copying: what is there, whole or in part, is not sent again. Knows nothing of models.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import runtime
from launcher import disk
from launcher.errors import JobFailed, LaunchError
from launcher.log import LOGGER
from launcher.machines.base import Progress
from launcher.machines.link import run_on
from launcher.machines.remote import SSH_BY_FILE, RemoteFolder
from launcher.machines.scripts import CODE, MODELS

# What the runtime reads of a model's folder; its subfolders hold other forms of the same.
FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")
# The slowest line that is waited for, and the least patience.
_SLOWEST_BYTES_PER_SECOND = 250_000
_LEAST_SECONDS = 900.0
_STILL_SECONDS = 60
_PAUSE_SECONDS = 3.0
# The machine's own timer may be armed with a minute.
_RENEW_EVERY_SECONDS = 15.0
# rsync's words for a connection that broke, and ssh's.
_LOST = (10, 12, 30, 35, 255)


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
    bound = time.monotonic() + max(_LEAST_SECONDS, size / _SLOWEST_BYTES_PER_SECOND)
    progress(f"bringing the model, {disk.in_units(size)}")
    models.shell(f"umask 077 && mkdir -p {shlex.quote(models.there)}", "make the model's folder")
    with _staying_up(models):
        while (trouble := _attempt(models, folder, progress, bound)) is not None:
            if_lost()
            if time.monotonic() > bound:
                raise _failed(f"took longer than a slow line needs for {disk.in_units(size)}", trouble)
            progress(f"the connection broke, going on: {trouble}")
            time.sleep(_PAUSE_SECONDS)


def _attempt(models: RemoteFolder, folder: Path, progress: Progress, bound: float) -> str | None:
    """One rsync; None when all is there, else how the connection broke. Raises JobFailed for all else."""
    command = ["rsync", "-rtL", "--partial", f"--timeout={_STILL_SECONDS}", *_telling()]
    command += [f"--include=/{pattern}" for pattern in FILES] + ["--exclude=*"]
    command += ["-e", SSH_BY_FILE, f"{folder}/", f"{models.host.address}:{models.there}/"]
    started_in = models.keep_ssh()
    with (
        tempfile.TemporaryFile() as said,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=said, cwd=started_in
        ) as rsync,
        _ended_at(rsync, bound),
    ):
        assert rsync.stdout is not None
        try:
            for line in _lines(rsync.stdout):
                progress(f"the model: {line}")
            code = rsync.wait()
        except BaseException:  # interrupted: it must not go on alone
            rsync.kill()
            raise
        said.seek(0)
        lines = [line.strip() for line in said.read().decode(errors="replace").splitlines() if line.strip()]
    if code == 0:
        return None
    why = next(
        (line for line in lines if not line.startswith("rsync error")), f"rsync ended with code {code}"
    )
    if code in _LOST or code < 0:
        return why
    raise _failed("could not be copied", why)


def _failed(how: str, why: str) -> JobFailed:
    return JobFailed(f"the model {how}", why, "launch --disk GB …, or a model of the hub")


def _lines(stdout: IO[bytes]) -> Iterator[str]:
    """How far it is: "12% of it, 110.50MB/s"; rsync overwrites one line, without ending it."""
    for piece in iter(lambda: stdout.read1(4096), b""):  # type: ignore[attr-defined]
        shown = re.findall(rb"(\d+)%\s+(\S+/s)", piece)
        if shown:
            share, speed = shown[-1]
            yield f"{share.decode()}%, {speed.decode()}"


def _telling() -> list[str]:
    """What makes rsync say how far it is, where it can: that of macOS cannot."""
    said = subprocess.run(["rsync", "--version"], capture_output=True, text=True, errors="replace").stdout
    version = re.match(r"rsync\s+version (\d+)\.(\d+)", said)
    able = version is not None and (int(version[1]), int(version[2])) >= (3, 1)
    return ["--info=progress2", "--no-inc-recursive"] if able else []


@contextlib.contextmanager
def _ended_at(rsync: subprocess.Popen[bytes], bound: float) -> Iterator[None]:
    """rsync ends when the time is over, whatever it does."""
    timer = threading.Timer(max(0.0, bound - time.monotonic()), rsync.kill)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def _staying_up(models: RemoteFolder) -> Iterator[None]:
    """Who copies is alive: the machine's own timer is set back meanwhile."""
    over = threading.Event()

    def renew() -> None:
        while not over.wait(_RENEW_EVERY_SECONDS):
            try:
                run_on(models.host, f"cd ~/{CODE} && python3 -m runtime.autodown", bound_seconds=30)
            except LaunchError as error:
                LOGGER.warning("the machine's timer was not set back: %s (%s)", error.message, error.why)

    thread = threading.Thread(target=renew, name="staying-up", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
