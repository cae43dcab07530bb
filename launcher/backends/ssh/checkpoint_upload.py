"""Uploads the durable checkpoints of a resumed run to its new machine: the newest first, then pins.

The files are read straight from the results' folder; nothing is staged here. On the machine they arrive
beside their place and are renamed into it last, so the machine has all checkpoints or none. Neighbours:
`durable.py` lists the files, `remote_results.py` keeps the machine there meanwhile, `uploads.py` copies.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

from launcher.backends.ssh.remote_folder import RemoteFolder
from launcher.backends.ssh.rsync import Transfer, TransferProgress
from launcher.backends.ssh.uploads import Upload
from launcher.base.failpoints import failpoint
from launcher.results import durable
from launcher.types.machine import Progress

# Files in folders, as they are: no links.
_FILES = "-rtp"
_MAKE_SECONDS = 60.0


def upload(
    remote: RemoteFolder,
    checkpoints: durable.CheckpointUpload,
    progress: Progress,
    on_disconnect: Callable[[], object],
) -> int:
    """Upload `checkpoints` to a machine that has nothing of the run; returns its step. Other steps in its
    folder are removed.

    `on_disconnect` is called whenever the connection breaks, and may raise. Raises JobFailed, LaunchError.
    """
    there = shlex.quote(remote.there)
    old = shlex.join([*durable.STEP_STATE, durable.UPLOADING])
    make = f"umask 077 && cd {there} && rm -rf -- {old} && mkdir {durable.UPLOADING}"
    remote.shell(make, "make room for its checkpoints", bound_seconds=_MAKE_SECONDS)
    _send_files(remote, checkpoints, progress, on_disconnect)
    for name, text in checkpoints.texts.items():
        remote.write(f"{durable.UPLOADING}/{name}", text.encode())
    if checkpoints.rewound is not None:
        remote.write(durable.REWOUND, checkpoints.rewound.encode())
    failpoint("cloud.seeding")
    place = shlex.quote("checkpoints" if checkpoints.step else checkpoints.folders[0].name)
    come = durable.UPLOADING if checkpoints.step else f"{durable.UPLOADING}/{place}"
    begin = f"cd {there} && rm -rf -- {place} && mv {come} {place} && rm -rf -- {durable.UPLOADING}"
    remote.shell(begin, "begin with its checkpoints", bound_seconds=_MAKE_SECONDS)
    return checkpoints.step


def _send_files(
    remote: RemoteFolder,
    checkpoints: durable.CheckpointUpload,
    progress: Progress,
    on_disconnect: Callable[[], object],
) -> None:
    parts = [([folder], durable.UPLOADING) for folder in checkpoints.folders]
    parts += [([*checkpoints.journals], ".")] if checkpoints.journals else []
    sizes = [sum(map(_size, paths)) for paths, _ in parts]
    what = f"step {checkpoints.step}" if checkpoints.step else "the adapter"
    upload = Upload(what, "launch status")
    for at, (paths, into) in enumerate(parts):
        before = sum(sizes[:at])

        def seen(moved: TransferProgress, before: int = before) -> None:
            now = TransferProgress(before + moved.bytes, sum(sizes), moved.bytes_per_second)
            progress(f"{what} to the machine: {now.describe()}")

        words = [_FILES, *map(str, paths), f"{remote.host.address}:{remote.there}/{into}/"]
        upload.run(remote, words, Transfer(sizes[at], seen), progress, on_disconnect)


def _size(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.lstat().st_size for file in files if file.is_file())
