"""A whole run around a machine in this process: `live(command, acts={"serve": …})`, and how it was.

Record, guardian, relay, heartbeat, minder and signals are the real ones. Neighbours: `pretend_machine.py` is
the machine; `tests/unit/conftest.py` has the fixture `live`.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from launcher.base.home import Home
from launcher.base.log import close_log
from launcher.cli.typed_line import TypedLine
from launcher.config.setting_sources import load
from launcher.console.output import Output
from launcher.records.records import RecordStore, RunRecord
from launcher.run.run import Run
from launcher.run.run_request import RunRequest
from launcher.types.plan import make_plan
from tests.support.pretend_machine import PretendMachine


@dataclass
class Lived:
    """A run that is over, and what can be seen of it."""

    code: int
    machine: PretendMachine
    record: RunRecord
    folder: Path
    stderr: str
    objects: list[dict[str, Any]] = field(default_factory=list)

    @property
    def end(self) -> dict[str, Any]:
        return self.objects[-1]


class Lives:
    """One run after the other, in a home below `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = Home(folder / "home", folder / "config", folder / "cache")
        self.store = RecordStore(self.home)
        self._run: Run | None = None

    def __call__(
        self,
        command: tuple[str, ...] = (sys.executable, "-c", "pass"),
        flags: dict[str, Any] | None = None,
        acts: dict[str, Callable[[], None]] | None = None,
        prepare: Callable[[PretendMachine], None] = lambda machine: None,
        lease_seconds: float = 900.0,
        budget: float | None = None,
        price: float = 0.0,
        planned: dict[str, Any] | None = None,
        terminal: TextIO | None = None,
    ) -> Lived:
        """`price`: of an hour of the machine, whose disk then goes with it; `planned`: fields of the plan;
        `terminal`: where a person sits, who is told instead of a program."""
        machine = PretendMachine(self.folder / "machine", acts, price)
        prepare(machine)
        settings = load({"port": None, **(flags or {})}, environ={}, folder=self.folder, home=self.home)
        settings = replace(settings, lease_seconds=lease_seconds, budget=budget)
        stdout, stderr = io.StringIO(), io.StringIO()
        output = Output(as_json=terminal is None, stdout=stdout, stderr=terminal or stderr, environ={})
        plan = replace(make_plan(settings), price_per_hour=price, **(planned or {}))
        typed = TypedLine((), command).started_by()
        request = RunRequest(settings, plan, "/nowhere", command, started_by=typed)
        self._run = Run(request, self.home, output, lambda record, store, home: machine)
        code = self._run.execute()
        close_log()
        (record,) = self.store.list()
        objects = [json.loads(line) for line in stdout.getvalue().splitlines()]
        return Lived(code, machine, record, self.store.folder(record.id), stderr.getvalue(), objects)

    def die(self) -> None:
        """What the guardian of the last run sees when its launch, which has not let it go, is gone."""
        assert self._run is not None and self._run._parts.guardian is not None
        stdin = self._run._parts.guardian._popen.stdin
        assert stdin is not None
        stdin.close()
