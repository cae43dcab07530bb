"""Runs the real `launch` as a user would, and finds what it left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.support.environment import REPOSITORY
from tests.support.waiting import wait_until


def _interruptible() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def processes_of(run_id: str) -> list[psutil.Process]:
    """Every living process that carries the run's id in its environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("SLIPWAY_RUN_ID") == run_id and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


@dataclass
class Launched:
    """One `launch` process, its output so far and its NDJSON events."""

    home: Path
    arguments: list[str]
    cwd: Path = REPOSITORY
    executable: list[str] = field(default_factory=lambda: [sys.executable, "-m", "launcher.cli.main"])
    environ: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._out = (self.home / f"stdout-{time.monotonic_ns()}.log").open("w+b")
        self._err = (self.home / f"stderr-{time.monotonic_ns()}.log").open("w+b")
        self.process = subprocess.Popen(
            [*self.executable, *self.arguments],
            cwd=self.cwd,
            env={**os.environ, "LAUNCH_HOME": str(self.home), **self.environ},
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._err,
            start_new_session=True,
            # As in a terminal: a test run started in the background would hand on an ignored Ctrl-C.
            preexec_fn=_interruptible,
        )

    @property
    def stdout(self) -> str:
        """What it printed as its result."""
        return Path(self._out.name).read_text(errors="replace")

    @property
    def stderr(self) -> str:
        """What it said while it worked."""
        return Path(self._err.name).read_text(errors="replace")

    @property
    def events(self) -> list[dict[str, Any]]:
        """The objects of `--json`, in order (the program's own lines are left out)."""
        found = []
        for line in self.stdout.splitlines():
            if line.startswith("{"):
                found.append(json.loads(line))
        return found

    @property
    def begun(self) -> bool:
        """Whether it has a run's folder yet."""
        return any((self.home / "runs").glob("slip-*"))

    @property
    def run_id(self) -> str:
        """The id of the newest run in this home."""
        runs = sorted((self.home / "runs").glob("slip-*"), key=lambda path: path.stat().st_mtime)
        return runs[-1].name

    @property
    def run_dir(self) -> Path:
        """The run's folder."""
        return self.home / "runs" / self.run_id

    def wait(self, seconds: float) -> int:
        """Wait for its end; on a time-out everything it said is the failure's text."""
        try:
            return self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.kill_tree()
            raise AssertionError(
                f"launch did not end in {seconds:g} s\n{self.stdout}\n{self.stderr}"
            ) from None

    def interrupt(self) -> None:
        """What a terminal does on Ctrl-C: INT to the whole foreground group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def wait_for_text(self, text: str, seconds: float) -> None:
        """Wait until it has said something; ends early when it dies."""
        wait_until(
            lambda: text in self.stdout + self.stderr or self.process.poll() is not None,
            seconds,
            lambda: f"{text!r} in\n{self.stderr}",
        )
        assert text in self.stdout + self.stderr, (
            f"launch ended without {text!r}:\n{self.stdout}\n{self.stderr}"
        )

    def kill_tree(self) -> None:
        """For tests that fail half-way: end what they started, by pid."""
        victims = [*processes_of(self.run_id)] if self.begun else []
        if self.process.poll() is None:
            victims += [self.process_handle(), *self.process_handle().children(recursive=True)]
        for victim in victims:
            try:
                victim.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.wait(timeout=60)

    def process_handle(self) -> psutil.Process:
        """psutil's view of it."""
        return psutil.Process(self.process.pid)
