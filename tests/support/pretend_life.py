"""A run's whole life in this process, around a machine that is paid for; any call in it can be made to raise.

    seen = PretendLife(tmp_path)("plain", Fault("record.update", ("setup",), lambda: OSError(28, "full")))

Record, relay, heartbeat, signals and the end are the real ones. The guardian only remembers whether it was
let go, the program is over once other threads have done what is awaited of them, and nobody waits for a
lease: at the second attempt to bring the results home the clock is put on beyond it.
Neighbours: `pretend_calls.py` has the calls, `pretend_machine.py` is the machine; `lived.py` has lives with a
real guardian and a real program.
"""

from __future__ import annotations

import functools
import io
import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launcher.backends import machine_from_record
from launcher.base import clock
from launcher.base.errors import NotPulled, as_launch_error
from launcher.base.home import Home
from launcher.base.log import REDACTOR, close_log
from launcher.config.setting_sources import load
from launcher.console.output import Output
from launcher.records.endpoint import save_token
from launcher.records.records import RecordStore, RunRecord
from launcher.results import background_copy
from launcher.run import ending, runtime_monitor, work
from launcher.run.resume_point import ResumePoint
from launcher.run.run import Run
from launcher.run.run_request import RunRequest
from launcher.teardown import guardian
from launcher.types.machine import Proof
from launcher.types.plan import RentedGpus, make_plan
from tests.support import pretend_machine
from tests.support.pretend_calls import Calls, Fault, Place, machine_calls
from tests.support.pretend_machine import PretendMachine
from tests.support.waiting import WAIT_SECONDS, wait_until

PRICE = 12.0
_LEASE_SECONDS = 900.0
_COMMAND = ("program",)
# A troubled runtime that is silent is noticed after so long.
_ANSWER_SECONDS = 0.1


class PretendGuardian:
    """It watches until it is let go."""

    process = None
    let_go = False

    def alive(self) -> bool:
        return not self.let_go

    def release(self) -> None:
        self.let_go = True


class PretendProgram:
    """It ends with 0 as soon as it is `over`."""

    process = None

    def __init__(self, over: Callable[[], bool]) -> None:
        self._over = over
        self._code: int | None = None
        self._bound = time.monotonic() + WAIT_SECONDS

    def poll(self) -> int | None:
        return self._code

    def wait(self, timeout_seconds: float | None = None) -> int | None:
        assert time.monotonic() < self._bound, "what is awaited while the program works does not happen"
        if self._over():
            self._code = 0
        else:
            time.sleep(0.005)
        return self._code

    def terminate(self) -> int:
        self._code = 128 + signal.SIGTERM
        return self._code


@dataclass(frozen=True)
class Seen:
    """An end. `asked`: what the machine was asked to do; `made`: each call with its phase; `struck`: how
    often one raised; `begun`: whether there was anything to end. `guardian`, `record`: None where there was
    none."""

    code: int
    begun: bool
    asked: list[str]
    made: list[Place]
    struck: int
    guardian: PretendGuardian | None
    record: RunRecord | None
    folder: Path
    objects: list[dict[str, Any]]
    stderr: str

    @property
    def end(self) -> dict[str, Any]:
        """The last object of `--json`."""
        return self.objects[-1]


class PretendLife:
    """One life, in a home below `folder`.

    "plain": all goes well. "rewound": the run is taken up on another machine. "troubled": the runtime falls
    silent, no step becomes durable, and the results cannot be brought home.
    """

    def __init__(self, folder: Path, kind: type[PretendMachine] = PretendMachine) -> None:
        self._folder = folder
        self.home = Home(folder / "home", folder / "config", folder / "cache")
        self.store = RecordStore(self.home)
        self._machine = kind(folder / "machine", price=PRICE)
        self._machine.found_again = True
        self._described = self._machine.describe()
        self._guardian: PretendGuardian | None = None
        self._slept_seconds = 0.0

    def __call__(
        self,
        life: str,
        *faults: Fault,
        until: Collection[Place] = (),
        entered: Mapping[str, Callable[[], None]] | None = None,
    ) -> Seen:
        """Live it. What is raised in the place of an exit code becomes one, as in main.py."""
        calls = Calls(faults, until, entered)
        stdout, stderr = io.StringIO(), io.StringIO()
        output = Output(as_json=True, stdout=stdout, stderr=stderr, environ={})
        request = self._request(life)
        begun = True
        with pytest.MonkeyPatch.context() as patch:
            self._prepare(patch, calls, life)
            try:
                code = Run(request, self.home, output, functools.partial(self._made, calls)).execute()
            except Exception as error:  # noqa: BLE001 - the outermost boundary, as there
                code, begun = as_launch_error(error).exit_code, False
            finally:
                close_log()
        objects = [json.loads(line) for line in stdout.getvalue().splitlines()]
        return self._seen(calls, code, begun, objects, stderr.getvalue())

    def left_to_its_guardian(self, *faults: Fault) -> Seen:
        """A run at work whose launch is gone, ended by its guardian's code; 0: with proof."""
        calls = Calls(faults)
        record = self.store.create(name="dev", command=_COMMAND)
        record = self.store.update(record.id, state="work", machine=self._described, url="http://127.0.0.1:1")
        save_token(self.store.folder(record.id), "a-token-of-the-test")
        calls.phase = "work"
        with pytest.MonkeyPatch.context() as patch:
            self._prepare(patch, calls, "plain")
            # What runs below this process is the tests' own.
            patch.setattr(guardian, "_end_own_children", lambda: None)
            patch.setattr(guardian, "_end_command", lambda record: None)
            patch.setattr(guardian, "_log", lambda text: None)
            patch.setattr(guardian, "_PAUSE_SECONDS", 0.001)
            patch.setattr(guardian, "_GIVE_UP_SECONDS", 3)  # three tries, of a second each
            awake = SimpleNamespace(boot_seconds=itertools.count().__next__, asleep_seconds=lambda: 0.0)
            patch.setattr(guardian, "clock", awake)
            code = guardian._end(self.store, record.id, record.launch)
        return self._seen(calls, code, True, [], "")

    # ----------------------------------------------------------------- what it is made of

    def _request(self, life: str) -> RunRequest:
        """A rented run without a limit."""
        given = {"port": None, "name": "dev", "wandb": "offline"}
        settings = load(given, environ={}, folder=self._folder, home=self.home)
        settings = replace(settings, lease_seconds=_LEASE_SECONDS)
        gpus = RentedGpus("H100:1", ("aws",), idle_minutes=10, disk_gb=100, train_gpus=1, infer_gpus=1)
        plan = replace(make_plan(settings), price_per_hour=PRICE, deadline_seconds=None, rented=gpus)
        resumed = ResumePoint(self._over_already(), 3, rewinds=True) if life == "rewound" else None
        return RunRequest(settings, plan, "/nowhere", _COMMAND, resumed=resumed)

    def _over_already(self) -> RunRecord:
        """A run that has ended in order."""
        record = self.store.create(name="dev", command=_COMMAND)
        proof = Proof(True, "nothing is left").to_dict()
        return self.store.update(
            record.id, state="verified", ended=time.time(), ended_by="launch", proof=proof
        )

    def _made(self, calls: Calls, record: RunRecord, store: RecordStore, home: Home) -> PretendMachine:
        calls("machine_from_plan.make")
        return self._machine

    def _prepare(self, patch: pytest.MonkeyPatch, calls: Calls, life: str) -> None:
        """Have each call be one of `calls`, and nothing wait longer than it must."""
        for name in [name for name in os.environ if name.startswith("LAUNCH_")]:
            patch.delenv(name)
        calls.watch(patch)
        self._machine.acts = self._acts(calls, life)
        patch.setitem(machine_from_record._KINDS, pretend_machine.KIND, pretend_machine.PLACE)
        patch.setattr(guardian, "start", self._guard)
        program = functools.partial(calls.met, "work")
        patch.setattr("launcher.teardown.minder.start", lambda *words: PretendProgram(program))
        real = clock.boot_seconds
        patch.setattr(clock, "boot_seconds", lambda: real() + self._slept_seconds)
        # Each life has a token of its own, and what is said is searched for all that are known.
        patch.setattr(REDACTOR, "_secrets", set())
        for module, name in ((ending, "_PAUSE"), (runtime_monitor, "_RETRY"), (work, "_POLL")):
            patch.setattr(module, f"{name}_SECONDS", 0.01)
        for module, name in (
            (runtime_monitor, "_POLL"),
            (background_copy, "_RETRY"),
            (background_copy, "_BACKOFF"),
        ):
            patch.setattr(module, f"{name}_SECONDS", 0.02)
        if life == "troubled":
            patch.setattr("launcher.run.runtime_monitor._ANSWER_SECONDS", _ANSWER_SECONDS)

    def _guard(self, record: Path) -> PretendGuardian:
        self._guardian = PretendGuardian()
        return self._guardian

    def _acts(self, calls: Calls, life: str) -> dict[str, Callable[[], None]]:
        """What the machine does at each of its calls."""
        attempts = 0

        def pull() -> None:
            nonlocal attempts
            attempts += 1
            if attempts == 2:
                self._slept_seconds += _LEASE_SECONDS + 1
            calls("machine.pull")
            if life == "troubled":
                raise NotPulled("the results are still on the machine", "rsync ended with code 13")

        def make_durable() -> None:
            calls("machine.make_durable")
            if life == "troubled":
                raise NotPulled("the step is still on the machine", "rsync ended with code 13")

        def status() -> None:
            asked_why = (calls.phase, "machine.ended")
            if life == "troubled" and asked_why[0] in ("connect", "work"):
                wait_until(lambda: calls.over or asked_why in calls.made, what="somebody asks why")

        acts = {name: functools.partial(calls, f"machine.{name}") for name in machine_calls()}
        return acts | {"pull": pull, "make_durable": make_durable, "status": status}

    def _seen(self, calls: Calls, code: int, begun: bool, objects: list[dict[str, Any]], stderr: str) -> Seen:
        calls.over = True
        asked = list(self._machine.calls)
        # What is left of it where its own end raised.
        self._machine.acts = {}
        self._machine.down()
        record = next(iter(self.store.list()), None)
        folder = self.store.folder(record.id) if record is not None else self.store.runs
        made, struck = list(calls.made), calls.struck
        return Seen(code, begun, asked, made, struck, self._guardian, record, folder, objects, stderr)
