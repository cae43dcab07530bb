"""Downloads a run's results from its machine: the newest checkpoint and the pinned ones, their weights first,
then the rest that a resume needs and the rollout texts; metrics line by line; logs last.

Neighbours: `cloud_machine.py` asks for it, at the end at full speed and while the run lives at
`copy_rate.py`'s; `remote_staging.py` stages the files there; `rsync.py` copies, over an ssh connection of the
copy's own: never the one that the rollouts go through (`link.py`). The copy here has the machine's layout,
for `results_copy.py` to check.
"""

from __future__ import annotations

import json
import shlex
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from launcher.backends.ssh import remote_staging, rsync
from launcher.backends.ssh.copy_rate import CopyRate
from launcher.backends.ssh.remote_folder import RemoteFolder
from launcher.backends.ssh.rsync import Transfer, TransferProgress
from launcher.base import locks
from launcher.base.errors import JobFailed
from launcher.results import checkpoints, journals, whole_checkpoints
from launcher.results.durable import JOURNALS
from launcher.types.machine import Progress, Stopped, never_stopped, no_progress

_STAGING_SECONDS = 120.0
# The listing, and at most so much of each journal as is read at a time.
_MAX_STAGED_BYTES = (1 + len(JOURNALS)) * remote_staging.MAX_READ_BYTES
# Read now: at the moment of death an upgrade of this package may be half-way.
_STAGING_SCRIPT = Path(remote_staging.__file__).read_bytes()
# A copying process shows its progress beside the lock; one that shows none for so long is not waited for any
# more.
_STALL_SECONDS = 2 * rsync.STALL_SECONDS
# A copy that is soon done anyway is not worth a second connection.
_AT_ONCE_BYTES = 8 << 20
# As rsync's patterns. No links and no devices: a machine puts only files in folders here.
_FILES = "-rt"
_WEIGHTS = ("/checkpoints/pinned.json", "/checkpoints/best.json", "/checkpoints/*/")
_WEIGHTS += ("/checkpoints/*/adapter/***", "/checkpoints/*/manifest.json", "/checkpoints/*/state.json")
# The files that come with each step, also its rollout texts (`rollout_texts.py`).
_OF_STEPS = ("checkpoints/", "logs/rollouts/")
_STEPS = tuple(f"/{folder}***" for folder in _OF_STEPS)
_LOGS = ("/logs/*.log", "/logs/wandb/***")


def no_callback() -> None:
    """Ignore the call."""


@dataclass
class ResultsDownload:
    """One copy of `remote` to `remote.here`. `copy_rate`: the limit of a live run, None for full speed.
    `weights_home` is called when the weights are here and the rest that a resume needs is not yet."""

    remote: RemoteFolder
    progress: Progress = no_progress
    stopped: Stopped = never_stopped
    copy_rate: CopyRate | None = None
    weights_home: Callable[[], object] = no_callback
    logs: bool = True
    _moved: int = field(default=0, init=False)

    def run(self) -> None:
        """All of it. Where the newest checkpoint turns out not to be whole, the one before as well, and so
        on. Raises JobFailed."""
        here = self.remote.here
        here.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:  # `launch pull` may copy while the run does
            with locks.exclusive(here, _STALL_SECONDS) as held:
                newest = 1
                while not self._download(newest, held.touch):
                    newest += 1
        except OSError as error:
            raise JobFailed("copying did not start", error.strerror, None) from error

    def _download(self, newest: int, alive: Callable[[], object]) -> bool:
        """So many of the newest; whether one of them is whole, or there are no more."""
        files = self._stage(newest)
        of_steps = {n: s for n, s in files.items() if n.startswith(_OF_STEPS)}
        missing = {n: s for n, s in of_steps.items() if not self._is_downloaded(n, s)}
        logs = self._logs_bytes({n: s for n, s in files.items() if n not in of_steps})
        weights = sum(size for name, size in missing.items() if _is_weights(name))
        rest = sum(missing.values()) - weights
        total = weights + rest + logs
        self._moved = 0
        if rest > _AT_ONCE_BYTES:
            self._copy(_WEIGHTS, weights, total, alive)
            self.weights_home()
        if of_steps:  # also if nothing is missing: an equal size does not prove equal content
            self._copy(_STEPS, weights + rest, total, alive)
        if self.logs:
            self._copy(_LOGS, logs, total, alive, "--inplace")
        for folder in _OF_STEPS:
            self._remove_unwanted(folder, files)
        folder = self.remote.here / "checkpoints"
        names = checkpoints.names(folder)
        return len(names) < newest or any(
            whole_checkpoints.is_whole(folder / name) for name in names[:newest]
        )

    # -------------------------------------------------------------- the files there

    def _stage(self, newest: int) -> dict[str, int]:
        """Stage the files there and append the journals here. Returns the sizes of the files to copy, by
        path."""
        here = self.remote.here
        request = {
            "newest": newest,
            "journals": {name: journals.known_prefix(here / name) for name in JOURNALS},
        }
        reply = self.remote.shell(
            f"umask 077 && cd {shlex.quote(self.remote.there)} &&"
            f" python3 - {shlex.quote(json.dumps(request))}",
            "list its files",
            _STAGING_SCRIPT,
            _STAGING_SECONDS,
            _MAX_STAGED_BYTES,
        )
        line, _, texts = reply.partition(b"\n")
        try:
            told = json.loads(line)
            files = {_checked_path(name): max(0, int(size)) for name, size in told["files"].items()}
            self._extend(told["journals"], texts)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise JobFailed(
                f"{self.remote.host.address}: its files could not be listed", str(error), None
            ) from error
        return files

    def _extend(self, told: list[Any], texts: bytes) -> None:
        for name, at, count in told:
            if name not in JOURNALS:
                raise ValueError(f"{name!r} was not asked for")
            journals.extend(self.remote.here / name, int(at), texts[: int(count)])
            texts = texts[int(count) :]

    def _is_downloaded(self, name: str, size: int) -> bool:
        try:
            found = (self.remote.here / name).lstat()
        except OSError:
            return False
        return found.st_size == size

    def _logs_bytes(self, logs: dict[str, int]) -> int:
        """The bytes of the logs that are not here yet."""
        if not self.logs:
            return 0
        total = 0
        for name, size in logs.items():
            path = self.remote.here / name
            total += max(0, size - (path.stat().st_size if path.is_file() else 0))
        return total

    # -------------------------------------------------------------- how it comes

    def _copy(
        self, wanted: tuple[str, ...], size: int, total: int, alive: Callable[[], object], *how: str
    ) -> None:
        before, first, last = self._moved, None, None

        def seen(moved: TransferProgress) -> None:
            nonlocal first, last
            alive()
            last = (time.monotonic(), moved.bytes)
            first = first or last
            self._moved = before + moved.bytes
            self.progress(TransferProgress(self._moved, total, moved.bytes_per_second).describe())

        tops = (f"/{pattern.split('/')[1]}/" for pattern in wanted)
        filters = [f"--include={pattern}" for pattern in dict.fromkeys((*tops, *wanted))]
        source = f"{self.remote.host.address}:{self.remote.there}/{remote_staging.OUT}/"
        rate = self.copy_rate.rate if self.copy_rate is not None else None
        copy = Transfer(size, seen, self.stopped, rate)
        self.remote.rsync([_FILES, *how, *filters, "--exclude=*", source, f"{self.remote.here}/"], copy)
        if self.copy_rate is not None and first is not None and last is not None:
            self.copy_rate.learn(last[1] - first[1], last[0] - first[0])

    def _remove_unwanted(self, name: str, files: dict[str, int]) -> None:
        """Remove files here that the machine does not have any more, and checkpoints that are neither newest
        nor pinned."""
        folder = self.remote.here / name
        wanted = {file.removeprefix(name).partition("/")[0] for file in files if file.startswith(name)}
        for path in list(folder.iterdir()) if folder.is_dir() else []:
            if path.name in wanted:
                continue
            if path.is_dir() and not path.is_symlink():
                going = path.with_name(f".going-{path.name}")
                path.rename(going)  # a half-removed folder must not look like a checkpoint
                shutil.rmtree(going)
            else:
                path.unlink()


def _checked_path(name: str) -> str:
    """A path as the layout has them. Raises ValueError."""
    parts = PurePosixPath(name).parts
    if len(parts) < 2 or parts[0] not in ("checkpoints", "logs") or ".." in parts:
        raise ValueError(f"{name!r} was not asked for")
    return name


def _is_weights(name: str) -> bool:
    parts = PurePosixPath(name).parts
    of_a_checkpoint = len(parts) == 2 or parts[2] in ("adapter", checkpoints.MANIFEST, checkpoints.STATE)
    return parts[0] == "checkpoints" and of_a_checkpoint
