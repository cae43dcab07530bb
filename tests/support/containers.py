"""A process where another container or computer would have it, with this home: real namespaces.

In a PID namespace of its own with its own /proc, so that it sees no process of ours; as another computer it
has another boot id and host name as well. Neighbours: `small_disk.py` does the same with a disk.
"""

from __future__ import annotations

import os
import subprocess
import uuid
from pathlib import Path
from typing import Any

import pytest

from tests.support.environment import REPOSITORY

_ALONE = ("unshare", "-rm", "--uts", "--pid", "--fork", "--kill-child=KILL", "--mount-proc")
_BOOT = """
mount --bind "$1" /proc/sys/kernel/random/boot_id
if [ -n "$2" ]; then hostname "$2"; fi
shift 2
exec "$@"
"""


def container(*words: object) -> list[object]:
    """Another container of this computer."""
    return [*_ALONE, *words]


def computer(folder: Path, host: str, *words: object) -> list[object]:
    """Another computer, with a boot of its own; without a `host` it is this one after a reboot."""
    boot = folder / f"boot-{uuid.uuid4().hex[:8]}"
    boot.write_text(f"{uuid.uuid4()}\n")
    return [*_ALONE, "sh", "-ec", _BOOT, "sh", boot, host, *words]


def start(words: list[object], **options: Any) -> subprocess.Popen[str]:
    """It, with this tree's code; skips the test where this user may make no namespaces."""
    if refused := _refused():
        pytest.skip(f"this user may make no namespaces: {refused}")
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.Popen(list(map(str, words)), text=True, env=environ, **options)


def _refused() -> str:
    done = subprocess.run([*_ALONE, "true"], capture_output=True, text=True)
    return done.stderr.strip() if done.returncode else ""
