"""Runs one program to its end, with a log. It never outlives this process.

Neighbours: `slipway_side.py` has the command. A `launch` among its processes gets a signal that lets it end
its own run in order. Knows nothing of the program.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launcher.base import processes
from launcher.base.errors import JobFailed
from launcher.base.processes import ProcessId
from launcher.bench.cpu_seconds import CpuSeconds

_POLL_SECONDS = 0.5
# Each look at the computing processes takes some ten milliseconds itself.
_CPU_SAMPLE_SECONDS = 2.0
# `launch` brings results home and proves that all is down.
_GRACE_SECONDS = 120.0
_SHOWN_LINES = 8
_TAIL_BYTES = 8192
# Neither side gets these variables of the user's. They would set the number of threads and the precision of
# each side, and differently: our engine has its own values, and another trainer has none. A side that writes
# no byte code would compile all its imports at each start, unless it was written there before.
_NOT_FOR_SIDES = (
    "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "TORCH", "PYTORCH_", "ACCELERATE_", "VLLM_",
    "SLIPWAY_", "PYTHONSAFEPATH", "PYTHONDONTWRITEBYTECODE",
)  # fmt: skip


@dataclass(frozen=True)
class ProcessLifetime:
    """From when to when a program ran, in seconds since the epoch."""

    began: float
    ended: float
    cpu: CpuSeconds = field(default_factory=CpuSeconds)


def run(
    what: str,
    command: Sequence[str],
    *,
    folder: Path,
    environ: Mapping[str, str],
    max_seconds: float,
    progress: Callable[[str], None],
    at_our_end: signal.Signals = signal.SIGKILL,
) -> ProcessLifetime:
    """Run it in `folder`, where its `stdout.log` and `stderr.log` stay; `progress` gets its newest line.

    `at_our_end`: the signal it gets when this process dies. Raises JobFailed when it fails or takes too long.
    """
    errors = folder / "stderr.log"
    began, cpu = time.time(), CpuSeconds()
    with (folder / "stdout.log").open("wb") as out, errors.open("wb") as err:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={name: value for name, value in environ.items() if not name.startswith(_NOT_FOR_SIDES)},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,  # a Ctrl-C reaches it once, from here
            preexec_fn=functools.partial(processes.die_with_parent, at_our_end, os.getpid()),
        )
        try:
            code = _wait(process, errors, began + max_seconds, progress, cpu)
        except BaseException:  # a Ctrl-C above all: the started program must not go on
            progress("it is being ended, which may take two minutes")
            _end(process)
            raise
    ended = time.time()
    if code is None or code != 0:
        _end(process)
        how = f"was not done after {max_seconds:.0f} s" if code is None else f"ended with code {code}"
        lines = _tail(errors)[-_SHOWN_LINES:]
        raise JobFailed(f"{what} {how}", lines[-1] if lines else None, f"less {errors}", code, lines)
    return ProcessLifetime(began, ended, cpu)


def _wait(
    process: subprocess.Popen[bytes],
    errors: Path,
    bound: float,
    progress: Callable[[str], None],
    cpu: CpuSeconds,
) -> int | None:
    """Its exit code; None when its time was over."""
    looked = 0.0
    while time.time() < bound:
        if time.time() - looked >= _CPU_SAMPLE_SECONDS:
            looked = time.time()
            cpu.sample(process.pid)
        try:
            return process.wait(_POLL_SECONDS)
        except subprocess.TimeoutExpired:
            if lines := _tail(errors):
                progress(lines[-1])
    return None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End it as a Ctrl-C would; kill it with all its descendants if it does not end."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            found = ProcessId.of(process.pid)
            processes.end(lambda: {found} if found else set(), grace_seconds=5.0)
            process.wait()


def _tail(path: Path) -> list[str]:
    """The newest lines of a log that have something in them."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return [line.strip() for line in lines if line.strip()]
