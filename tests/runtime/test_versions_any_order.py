"""The served versions in any order: published, named, called back, pinned, pruned; killed, a machine lost.

Alias, publisher, reload, verification, pool and checkpoints are real; the engines and the trainer are played.
The gateway is killed before any of its changes of the disk, the engines at any time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from runtime.gateway.engines import engine_pool
from runtime.gateway.engines.engine_client import EngineError
from runtime.gateway.engines.version_check import AdapterVerifier
from runtime.gateway.http.openai_errors import ApiError
from runtime.gateway.http.step_errors import NotPublishedError
from runtime.gateway.steps.rewind import FILE, Rewind
from runtime.gateway.versions import publishing, versions
from runtime.gateway.versions.publishing import Publisher
from runtime.gateway.versions.versions import Served, Versions, kept_versions, weights_of
from runtime.shared import checkpoint
from runtime.shared.checkpoint import (
    ADAPTER_WEIGHTS,
    SERVING,
    CheckpointError,
    CheckpointStore,
    checkpoint_name,
    newest_step,
    served_checkpoint_names,
)
from runtime.shared.json_files import read_json, write_json
from runtime.shared.process_status import SupervisorStatus
from tests.runtime.played_engines import NO_WEIGHTS, PlayedEngine, commit
from tests.runtime.virtual_time import VirtualLoop
from tests.support.dying_process import DyingProcess, leave_torn, memory_folder

LOADED, RELOADED, PINNED, KEPT = 2, 2, 3, 5
SOON, LATER = 0.2, 12.0
RECORD = "publications.jsonl"
PLACES = st.integers(0, 99)
FIRST = st.sampled_from(
    [""] * 6 + ["pins"] * 4 + ["is damaged", "is killed", "is killed", "loses its machine"]
)  # fmt: skip
# Before which of its changes of the disk a process dies, or another comes: mostly before none.
WHEN = st.sampled_from([None] * 20 + [*range(1, 11)])
NAMES = st.sampled_from(
    ["number", "number", "number", "hash", "hash", "given", "given", "alias", "base", "future"]
)


@dataclass
class Asked:
    """A request for a name, when `newest` was served; what it was resolved to, and its answer's weights."""

    name: str
    newest: int
    served: list[Served] = field(default_factory=list)
    task: asyncio.Task[str] = field(init=False)


class Gateway:
    """One process of the gateway, as far as it serves versions."""

    def __init__(self, folder: Path, engines: list[PlayedEngine], ended: set[int]) -> None:
        """`ended`: versions whose steps have ended, as the queue's folder has it."""
        self.ended, self.count = ended, 0
        self.checkpoints = CheckpointStore(folder / "checkpoints")
        rewind = Rewind.read(folder)
        self.versions = Versions(
            folder / SERVING, "policy", keep=LOADED,
            kept=lambda: kept_versions(self.checkpoints),
            weights=lambda version: weights_of(self.checkpoints, version),
            reused_after=rewind.reused_after if rewind else None,
        )  # fmt: skip
        clients: list[Any] = engines
        verifier = AdapterVerifier(clients, "policy")
        status = SupervisorStatus(folder, 60.0)
        self.publisher = Publisher(clients, status, verifier, self.versions, self.checkpoints, folder)

    async def serve(self) -> None:
        """Publish each committed version in its turn, the newest again after a failure, as the queue does."""
        while True:
            newest = newest_step(self.checkpoints)
            for version in range(max(self.ended, default=0) + 1, newest + 1):
                if checkpoint_name(version) in self.checkpoints.names():
                    await self._publish(version)
            if self.versions.current != newest:
                await self._publish(newest)
            await asyncio.sleep(SOON)

    async def _publish(self, version: int) -> None:
        with contextlib.suppress(NotPublishedError):
            await self.publisher.publish(self.checkpoints.load(checkpoint_name(version)))
        self.ended.add(version)

    async def answer(self, model: str, used: Callable[[Served], None]) -> str:
        """The hash of the weights that answer; as proxy.py has it. Raises ApiError."""
        served = self.versions.resolve(model)
        self.versions.acquire(served.version)
        try:
            pool = self.publisher.pool
            for _ in range(2):
                self.count += 1
                other = pool.engines[self.count % len(pool.engines)]
                engine = await pool.pick(served.version, excluded=other)
                client: Any = engine.client
                used(served)
                with contextlib.suppress(EngineError):
                    if (found := await client.answer(served.engine_model)) is not None:
                        return found
                pool.mark_unreachable(engine)
            raise ApiError(503, "the engine died while answering")
        finally:
            self.versions.release(served.version)


class VersionsInAnyOrder(RuleBasedStateMachine):
    """A run over the lives of its gateway and its engines, and over machines."""

    @initialize(
        engines=st.integers(1, 2), seconds=st.sampled_from([0.0, 0.03]), threads=st.sampled_from([0.0, 0.01])
    )  # fmt: skip
    def begin(self, engines: int, seconds: float, threads: float) -> None:
        self.root, self.machine, self._told = memory_folder(), 0, 0
        self.loop = VirtualLoop(threads)
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(engine_pool, "time", SimpleNamespace(monotonic=self.loop.time))
        self.patch.setattr(engine_pool, "WAIT_SECONDS", 3.0)
        self.patch.setattr(publishing, "ENGINES_SECONDS", 3.0)
        self.patch.setattr(versions, "MAX_RELOADED", RELOADED)
        self.patch.setattr(checkpoint, "MAX_PINNED", PINNED)
        # Every name that was answered or listed, and the weights that it means for ever.
        self.meaning: dict[str, str] = {"base": NO_WEIGHTS, "policy@v0": NO_WEIGHTS}
        # By version, the weights that this machine has committed; those that were damaged since.
        self.weights: dict[int, str] = {0: NO_WEIGHTS}
        self.damaged: set[int] = set()
        self.pins: list[str] = []
        self.best = ""
        self.names = [f"engine-{place}" for place in range(engines)]
        self.seconds = seconds
        self._begin_machine()
        self._start()

    @rule(
        trains=st.sampled_from([True, True, False]), asks=st.lists(st.tuples(NAMES, PLACES), max_size=4),
        engine=st.sampled_from(["lives", "lives", "lives", "lives", "restarts", "is away", "is off"]),
        place=PLACES, seconds=st.sampled_from([SOON, SOON, 2.0]), dies=WHEN, prunes=WHEN,
        torn=st.floats(0, 1), first=FIRST, back=st.integers(0, 5), best_of=st.sampled_from([None, "a", "b"]),
    )  # fmt: skip
    def go_on(
        self,
        first: str,
        back: int,
        best_of: str | None,
        prunes: int | None,
        trains: bool,
        asks: list[Any],
        engine: str,
        place: int,
        seconds: float,
        dies: int | None,
        torn: float,
    ) -> None:
        """The trainer commits, requests name versions, an engine has an accident, and some time passes.

        One rule: of several, Hypothesis leaves some out of an example, which would come to no version.
        """
        if first == "pins":
            self._pin(back, best_of, dies, prunes, torn)
        elif first == "is damaged":
            self._damage(2 + back)
        elif first == "is killed":
            self.process.is_dead = True
            self._survive(torn)
        elif first == "loses its machine":
            self._lose_machine(back % 2)
        one = self.engines[place % len(self.engines)]
        one.is_up, one.off = engine != "is away", 0.01 if engine == "is off" else 0.0
        if engine == "restarts":
            self._restart(one)
        if trains:
            self._train()
        if dies is not None:
            self.process.plan(dies, self.process.kill)
        with self.process.at_work():
            self._ask([self._name(which, at) for which, at in asks])
            self.loop.go_on(seconds)
        self._survive(torn)

    def _pin(self, back: int, best_of: str | None, dies: int | None, prunes: int | None, torn: float) -> None:
        """A version is to be kept, while the trainer may be removing old ones."""
        version = max(1, newest_step(self.checkpoints) - back)
        name, store = checkpoint_name(version), self.gateway.checkpoints
        if prunes is not None:
            self.process.plan(prunes, self._train)
        if dies is not None:
            self.process.plan(dies, self.process.kill)
        with self.process.at_work():
            try:
                gone = store.pin(name, best_of).let_go
            except CheckpointError:
                assert version in self.damaged or name not in store.names()
            else:
                self.pins = [one for one in self.pins if one not in (name, *gone)] + [name]
                assert self.best not in gone or best_of
                self.best = name if best_of else self.best
        if self.process.is_dead:
            found = store.pinned()
            missing = set(self.pins) - found
            assert found <= {*self.pins, name} and len(missing) <= 1 and (not missing or name in found)
            self.pins = [one for one in dict.fromkeys([*self.pins, name]) if one in found]
            self.best = (read_json(store.root / "best.json") or {"checkpoint": ""})["checkpoint"]
        self._survive(torn)

    def _damage(self, back: int) -> None:
        """A bit of an old version's weights flips on the disk."""
        version = newest_step(self.checkpoints) - back
        path = self.checkpoints.root / checkpoint_name(version) / ADAPTER_WEIGHTS
        if version < self._served() and path.exists() and version not in self.damaged:
            content = bytearray(path.read_bytes())
            content[0] ^= 1
            path.write_bytes(content)
            self.damaged.add(version)

    def _lose_machine(self, back: int) -> None:
        """The run goes on elsewhere from one of its newest steps, whose numbers are given out once more."""
        steps = [int(name[-6:]) for name in self.checkpoints.names()]
        step = steps[-1 - back % len(steps)] if steps else 0
        if not steps or step in self.damaged:
            return
        self._end()
        old = self.folder
        self.machine += 1
        self.reused_after = min(step, self.reused_after)
        self._begin_machine()
        whole = {checkpoint_name(version) for version in self.weights if version not in self.damaged}
        self.pins = [name for name in self.pins if name in whole and name <= checkpoint_name(step)]
        kept = {checkpoint_name(step), *self.pins}
        for name in kept:
            shutil.copytree(old / "checkpoints" / name, self.checkpoints.root / name)
        write_json(self.checkpoints.root / "pinned.json", self.pins)
        self.best = self.best if self.best in kept else ""
        if self.best:
            write_json(self.checkpoints.root / "best.json", {"checkpoint": self.best, "of": "a"})
        if (old / RECORD).exists():
            shutil.copy(old / RECORD, self.folder)
        rewound = {"to_step": step, "reused_after": self.reused_after}
        (self.folder / FILE).write_text(json.dumps(rewound))
        self.weights = {at: it for at, it in self.weights.items() if checkpoint_name(at) in kept}
        self.weights[0] = NO_WEIGHTS
        self.damaged.clear()
        self._start()

    # ------------------------------------------------------------- what is always so

    def _check(self) -> None:
        store = self.checkpoints
        assert not self._tasks[0].done() and not self._tasks[1].done(), self._tasks
        served = read_json(self.folder / SERVING) or {"version": 0}
        now = self.gateway.versions
        assert now.current == served["version"] >= self._served_before, "the alias goes back with no restart"
        self._served_before = now.current
        assert now.current in self.weights
        for name in self.pins:
            assert name in store.names(), "what is pinned is kept"
        assert set(self.pins) <= store.pinned() and len(self.pins) <= PINNED
        if self.best:
            assert self.best in self.pins and read_json(store.root / "best.json")["checkpoint"] == self.best
        for engine in self.engines:
            for name, weights in engine.weights.items():
                version = int(name.removeprefix("policy@v"))
                assert version not in now.staged or weights == self.weights[version]
        for model in now.models()["data"]:
            if model["id"] != "policy":
                found = now.resolve(model["id"])
                self._means(model["id"], self.weights[found.version])

    def _means(self, name: str, weights: str) -> None:
        assert self.meaning.setdefault(name, weights) == weights, f"{name} means one version for ever"

    def _answered(self, asked: Asked) -> None:
        name, error = asked.name, asked.task.exception()
        if error is None:
            weights = asked.task.result()
            assert weights == self.weights[asked.served[-1].version]
            if name != "policy":
                self._means(name, weights)
            return
        assert isinstance(error, ApiError), error
        _, _, number = name.partition("@v")
        version, _, weights = number.partition("+")
        if error.status == 409:
            assert weights or int(version) > self.reused_after
        elif error.status == 404:
            is_kept = checkpoint_name(int(version)) in self.checkpoints.names()
            assert int(version) > asked.newest or not is_kept or int(version) in self.damaged
        else:
            assert error.status == 503

    def teardown(self) -> None:
        if not hasattr(self, "patch"):
            return
        try:
            if sys.exc_info()[0] is None:
                self._finish()
        finally:
            self._end()
            self.loop.close()
            self.patch.undo()
            shutil.rmtree(self.root)

    def _finish(self) -> None:
        """With all engines well the newest is served, and each name that is listed is answered."""
        for engine in self.engines:
            engine.is_up, engine.off = True, 0.0
        self._pass(LATER)
        self._train()
        self._pass(LATER)
        newest = newest_step(self.checkpoints)
        assert self._served() == newest
        for model in self.gateway.versions.models()["data"]:
            try:
                version = self.gateway.versions.resolve(model["id"]).version
            except ApiError as error:  # it was loaded until another took its place, and pruned before
                number = int(model["id"].partition("@v")[2].partition("+")[0])
                is_kept = checkpoint_name(number) in self.checkpoints.names()
                if is_kept or error.status != 404:
                    raise
                continue
            is_loaded = self.gateway.versions.is_loaded(version)
            with self.process.at_work():
                self._ask([model["id"]])
                self.loop.go_on(SOON + 40 * self.seconds)
            (asked,) = self._asked
            error = asked.task.exception()
            is_gone = isinstance(error, ApiError) and error.status == 404
            assert error is None or (is_gone and version in self.damaged and not is_loaded), (asked, error)
            self._check_asked()
            most = LOADED + RELOADED + 1
            assert all(len(it.weights) <= most for it in self.engines), "they have room for so many"
        assert self.gateway.versions.newest.version == newest

    # ------------------------------------------------------------- the gateway's life

    @property
    def folder(self) -> Path:
        return self.root / str(self.machine)

    def _begin_machine(self) -> None:
        self.folder.mkdir()
        self.checkpoints = CheckpointStore(self.folder / "checkpoints")
        self.checkpoints.root.mkdir()
        self.engines = [PlayedEngine(name) for name in self.names]
        for engine in self.engines:
            engine.seconds = self.seconds
        self._served_before, self._ended = 0, set[int]()
        if self.machine == 0:
            self.reused_after = 1 << 30
        self._tell_supervisor()

    def _tell_supervisor(self) -> None:
        children = [{"name": it.name, "pid": it.lives, "state": "ready"} for it in self.engines]
        path = self.folder / "supervisor.json"
        write_json(path, {"phase": "ready", "children": children})
        self._told += 1
        os.utime(path, ns=(self._told, self._told))  # one that differs, however soon it comes

    def _restart(self, engine: PlayedEngine) -> None:
        engine.restart()
        self._tell_supervisor()

    def _start(self) -> None:
        self.process = DyingProcess(self.folder)
        self._asked: list[Asked] = []
        with self.process.at_work():
            self.gateway = Gateway(self.folder, self.engines, self._ended)
            works = (self.gateway.publisher.pool.watch(), self.gateway.serve())
            self._tasks = [self.loop.create_task(work) for work in works]
            self.loop.go_on(SOON)
        assert not self.process.is_dead

    def _end(self) -> None:
        self.process.is_dead = True
        with self.process.at_work():
            self.loop.end_all()

    def _survive(self, torn: float) -> None:
        """The next process of the gateway comes, if this one has died."""
        if self.process.is_dead:
            self._end()
            leave_torn(self.folder, torn)
            self._start()
        self.process.forget_plans()
        self._check_asked()
        self._check()

    def _pass(self, seconds: float) -> None:
        with self.process.at_work():
            self.loop.go_on(seconds)
        self._check_asked()
        self._check()

    # ------------------------------------------------------------- trainer and requests

    def _train(self) -> None:
        """One more version, at most two ahead of the served one; old ones are removed."""
        version = newest_step(self.checkpoints) + 1
        if version > self._served() + 2:
            return
        made = commit(self.checkpoints, version, self.machine)
        self.weights[version] = made.adapter_sha256
        self.damaged.discard(version)
        self._prune()

    def _prune(self) -> None:
        self.checkpoints.prune(KEPT, served_checkpoint_names(self.folder))

    def _served(self) -> int:
        return self.gateway.versions.current

    def _name(self, which: str, place: int) -> str:
        version = place % (newest_step(self.checkpoints) + 1)
        given = sorted(self.meaning)
        return {
            "alias": "policy",
            "number": f"policy@v{version}",
            "hash": f"policy@v{version}+{self.weights.get(version, '0' * 12)[:12]}",
            "given": given[place % len(given)],
            "base": "base",
            "future": f"policy@v{self._served() + 3}",
        }[which]

    def _ask(self, names: list[str]) -> None:
        for name in names:
            asked = Asked(name, self._served())
            asked.task = self.loop.create_task(self.gateway.answer(name, asked.served.append))
            self._asked.append(asked)

    def _check_asked(self) -> None:
        for asked in [it for it in self._asked if it.task.done()]:
            self._answered(asked)
        self._asked = [it for it in self._asked if not it.task.done()]


def test_c55_c35_in_any_order_a_name_means_one_versions_weights_for_ever() -> None:
    bounds = settings(
        max_examples=26, stateful_step_count=15, deadline=None, derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
    )  # fmt: skip
    run_state_machine_as_test(VersionsInAnyOrder, settings=bounds)
