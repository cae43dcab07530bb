"""Each call that a run makes of its machine, its record and its token: in which phase, and what it raises.

    calls = Calls([Fault("record.update", ("setup",), lambda: OSError(28, "full"))])

Neighbours: `pretend_life.py` lives a run around these, `pretend_machine.py` is the machine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import pytest

from launcher.records import endpoint
from launcher.records.records import RecordStore
from launcher.teardown import guardian
from launcher.types.machine import Machine
from tests.support.waiting import wait_until

# By the states of a record; "writing" is its last word, and what is asked for the last lines.
PHASES = ("created", "arm", "push", "setup", "serve", "connect", "work", "pull", "down", "writing")
# Where a run is kept: paths, for which nobody is asked.
NAMES = frozenset({"folder", "path"})
_ENDS = {"verified": "writing", "unverified": "writing"}
# Made when their time comes, and not because the run gets on.
OF_THEIR_OWN = frozenset({"machine.make_durable", "machine.committed", "machine.ended"})

# A phase, and a call made in it: "machine.arm", "record.update", "token.drop", "machine_from_plan.make".
Place = tuple[str, str]


def calls_of(kind: type) -> frozenset[str]:
    """Every call, and all that may be asked for, of a class or of a protocol."""
    return frozenset(name for base in kind.__mro__ for name in vars(base) if not name.startswith("_"))


def machine_calls() -> frozenset[str]:
    """Those of a machine. `PretendMachine` has a phase by its key, which records on disk have."""
    return calls_of(Machine) - {"provision"} | {"arm"}


@dataclass(frozen=True)
class Fault:
    """What a call, or all that match it as file names do, raises each time it is made in these phases."""

    call: str
    phases: tuple[str, ...]
    error: Callable[[], Exception]

    def strikes(self, phase: str, call: str) -> bool:
        """Whether it is raised there."""
        return phase in self.phases and fnmatchcase(call, self.call)


class Calls:
    """What was called in which phase, in its order; from several threads. `until`: what is awaited of others
    before connect or work is left; `entered`: what happens as soon as the record says that a phase is."""

    def __init__(
        self,
        faults: Collection[Fault] = (),
        until: Collection[Place] = (),
        entered: Mapping[str, Callable[[], None]] | None = None,
    ) -> None:
        self.phase = PHASES[0]
        self.made: list[Place] = []
        # How often something was raised.
        self.struck = 0
        # Nothing is awaited any more.
        self.over = False
        self._faults = faults
        self._entered = entered or {}
        self._until = {*until}
        for fault in faults:
            if fault.call in OF_THEIR_OWN:
                self._until |= {(phase, fault.call) for phase in fault.phases}

    def __call__(self, call: str) -> None:
        """It is made now; raises what it is to raise."""
        phase = self.phase
        self.made.append((phase, call))
        for fault in self._faults:
            if fault.strikes(phase, call):
                self.struck += 1
                raise fault.error()

    def met(self, phase: str) -> bool:
        """Whether all that is awaited in a phase was called there."""
        return {place for place in self._until if place[0] == phase} <= {*self.made}

    def enter(self, phase: str) -> None:
        """The phase begins: its record is about to be written."""
        if phase == "work":
            wait_until(lambda: self.met("connect"), what=f"{self._until} in connect")
        self.phase = phase

    def has_entered(self, phase: str) -> None:
        """The record says so."""
        self._entered.get(phase, lambda: None)()

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        """From now on each call of any record, and of the token, is one of these first."""
        for name in calls_of(RecordStore) - NAMES:
            patch.setattr(RecordStore, name, _record_call(vars(RecordStore)[name], name, self))
        for place in ("run", "ending"):
            patch.setattr(f"launcher.run.{place}.delete_token", _token_call("drop", self))
        patch.setattr(guardian, "delete_token", _token_call("drop", self))
        patch.setattr("launcher.run.run.save_token", _token_call("keep", self))


def _record_call(real: Any, name: str, calls: Calls) -> Any:
    if isinstance(real, classmethod):
        return classmethod(_record_call(real.__func__, name, calls))

    @functools.wraps(real)
    def act(*words: Any, **named: Any) -> Any:
        state = "created" if name == "create" else named.get("state") if name == "update" else None
        phase = _ENDS.get(str(state), state)
        if phase is not None:
            calls.enter(phase)
        calls(f"record.{name}")
        found = real(*words, **named)
        if phase is not None:
            calls.has_entered(phase)
        return found

    return act


def _token_call(name: str, calls: Calls) -> Callable[..., None]:
    real = {"keep": endpoint.save_token, "drop": endpoint.delete_token}[name]

    def act(*words: Any) -> None:
        calls(f"token.{name}")
        real(*words)

    return act
