"""Looks for secrets on both sides of a rig: in every process's command line and environment while it lives,
and in every file that was written.

    with Watch() as watch:               20 looks a second, from outside: laptop and machines
        …
    watch.command_lines([secret])        those that held it
    watch.holders([secret])              which programs had it in their environment
    written(folder, since)               the files, for `files_holding`

First it looks, then it is asked: a run's token is not known before it is made. Neighbours: `rig.py` is what
it looks at, `tests/support/canaries.py` knows how a secret may be spelled.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import subprocess
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tests.support.canaries import spellings

LOOKS_PER_SECOND = 20.0
LAPTOP, MACHINE = "laptop", "machine"
_SIDES = {2: LAPTOP, 3: MACHINE}
_READ_BYTES = 1 << 20
_NOT_OURS = ("proc", "sys")


@dataclass(frozen=True)
class Seen:
    """One process as one program: what it was called with, and in what environment."""

    side: str
    line: bytes
    environ: bytes

    @property
    def name(self) -> str:
        """Our module or the script where there is one, else the program."""
        words = [os.fsdecode(word) for word in self.line.split(b"\0") if word]
        modules = [after for flag, after in itertools.pairwise(words) if flag == "-m"]
        if modules:
            return modules[-1]
        program = Path(words[0]).name
        scripts = [word for word in words[1:2] if program.startswith("python") and not word.startswith("-")]
        return Path(scripts[0]).name if scripts else program


class Watch:
    """Everything that runs in rigs, again and again while it is entered."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look_again, name="watch", daemon=True)
        self._last: dict[int, bytes] = {}
        self.seen: set[Seen] = set()
        self.looks = 0
        self.late = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def command_lines(self, secrets: Iterable[str]) -> list[str]:
        """The command lines that held one of the secrets."""
        wanted = _all_spellings(secrets)
        return sorted(
            {seen.line.replace(b"\0", b" ").decode() for seen in self.seen if _holds(seen.line, wanted)}
        )

    def holders(self, secrets: Iterable[str], side: str) -> set[str]:
        """The names of the programs on one side that had one of the secrets in their environment."""
        wanted = _all_spellings(secrets)
        return {seen.name for seen in self.seen if seen.side == side and _holds(seen.environ, wanted)}

    def names(self, side: str) -> set[str]:
        """The names of all programs seen on one side."""
        return {seen.name for seen in self.seen if seen.side == side}

    def _look_again(self) -> None:
        while not self._over.is_set():
            begun = time.monotonic()
            self._look()
            self.looks += 1
            left = begun + 1 / LOOKS_PER_SECOND - time.monotonic()
            self.late += left < 0
            self._over.wait(max(0.0, left))

    def _look(self) -> None:
        """One look. A process's environment is another one when it becomes another program."""
        now: dict[int, bytes] = {}
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            with contextlib.suppress(OSError):
                line = now[pid] = _read(f"/proc/{pid}/cmdline")
                if not line or self._last.get(pid) == line:
                    continue
                if (side := side_of(pid)) is not None:
                    self.seen.add(Seen(side, line, _read(f"/proc/{pid}/environ")))
        self._last = now


def side_of(pid: int) -> str | None:
    """Where in a rig a process runs; None out here. By how many numbers it has, one in each pid namespace
    from ours on."""
    status = _read(f"/proc/{pid}/status")
    line = next(line for line in status.splitlines() if line.startswith(b"NSpid:"))
    return _SIDES.get(len(line.split()) - 1)


def written(root: Path, since: float) -> list[Path]:
    """The files below a folder that were made or changed since a time; a machine's is /proc/PID/root."""
    pruned = [word for name in _NOT_OURS for word in ("-path", f"{root}/{name}", "-prune", "-o")]
    changed = ["-type", "f", "-newerct", f"@{since:.3f}", "-print0"]
    found = subprocess.run(["find", f"{root}/", *pruned, *changed], capture_output=True)
    return [Path(os.fsdecode(path)) for path in found.stdout.split(b"\0") if path]


def files_holding(files: Iterable[Path], secrets: Iterable[str]) -> list[Path]:
    """Those of the files that hold one of the secrets; a file that has gone holds none."""
    wanted = _all_spellings(secrets)
    found = []
    for file in files:
        with contextlib.suppress(OSError):
            if _holds(file.read_bytes(), wanted):
                found.append(file)
    return found


def _all_spellings(secrets: Iterable[str]) -> re.Pattern[bytes]:
    return re.compile(b"|".join(sorted(map(re.escape, {s for secret in secrets for s in spellings(secret)}))))


def _holds(text: bytes, wanted: re.Pattern[bytes]) -> bool:
    return wanted.search(text) is not None


def _read(path: str) -> bytes:
    """The kernel gives such a file whole, in one read that is large enough."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, _READ_BYTES)
    finally:
        os.close(descriptor)
