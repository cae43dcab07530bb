"""A run of the step queue for a state machine, and what its user may count on.

The queue, its folders, the samples and the checkpoints are real; trainer and engines are played. Neighbours:
test_steps_any_order.py has the rules, steps_run.py the run of the tests by example.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime.gateway.http.step_errors import (
    KeyReusedError,
    NothingToTrainError,
    NotPublishedError,
    QueueFullError,
    RewoundError,
    UnknownCheckpointError,
)
from runtime.gateway.samples.samples import SampleStore
from runtime.gateway.steps import empty_steps, rewind
from runtime.gateway.steps.queue import StepQueue
from runtime.gateway.steps.step_registry import MAX_QUEUED
from runtime.shared.batch import META, step_folder
from runtime.shared.checkpoint import (
    Checkpoint,
    CheckpointError,
    CheckpointStore,
    checkpoint_name,
    newest_step,
)
from runtime.shared.json_files import write_json
from runtime.shared.metrics import read_lines
from runtime.shared.schema import StepRequest
from runtime.shared.statuses import ENDED, StepStatus
from tests.runtime.recorded import sampled
from tests.runtime.steps_run import write_weights
from tests.runtime.virtual_time import VirtualLoop
from tests.support.dying_process import DyingProcess, leave_torn

KEPT = 3
SOON = 0.2  # more than the queue's polls and the played threads take
LATER = 31.0  # more than the queue waits before it tries a disk or an engine again
FAILED = "failed.json"
_ROUNDS = 100


@dataclass
class Asked:
    """A step that was sent. `number`, `empty`: its answer, once one came; None while in doubt."""

    key: str
    request: StepRequest | None = None
    restores: str = ""
    client_state: dict[str, Any] = field(default_factory=dict)
    number: int | None = None
    empty: StepStatus | None = None

    @property
    def is_known(self) -> bool:
        """Whether its user has an answer."""
        return self.number is not None or self.empty is not None

    @property
    def members(self) -> list[tuple[str, float]]:
        """The rollouts that have a reward."""
        groups = [] if self.request is None else self.request.groups
        members = [member for group in groups for member in group.members]
        return [(member.rollout, member.reward) for member in members if member.reward is not None]


class PlayedSteps:
    """One run over the lives of its gateway, and over machines."""

    def __init__(self, folder: Path, staleness: int, thread_seconds: float) -> None:
        self.root, self.staleness, self.machine = folder, staleness, 0
        self.loop = VirtualLoop(thread_seconds)
        self.asked: list[Asked] = []
        self.engines, self.trainer_failure = "serve", ""
        self.rewound: tuple[int, dict[str, Any] | None] | None = None
        # The newest place of its program that was seen.
        self.place = 0.0
        self._begin_machine()
        self.start()

    # ------------------------------------------------------------- the gateway's process

    @property
    def folder(self) -> Path:
        return self.root / str(self.machine)

    def _begin_machine(self) -> None:
        self.folder.mkdir()
        self.checkpoints = CheckpointStore(self.folder / "checkpoints")
        self.rollouts: list[str] = []
        # Sample → the step whose batch has it, unless that was given up.
        self.owner: dict[str, int] = {}
        self.ended: dict[int, StepStatus] = {}
        # Every step of this machine that ever had a version.
        self.committed = set[int]()
        self._looked_at: dict[int, str] = {}
        self.published: list[int] = []

    def start(self, torn: float = 1.0, dies: int | None = None) -> None:
        """A new process of the gateway, which may die as it starts: then another one does not."""
        leave_torn(self.folder, torn)
        for plan in (dies, None):
            self.process = DyingProcess(self.folder)
            if plan is not None:
                self.process.plan(plan, self.process.kill)
            with self.process.at_work():
                self.samples = SampleStore(self.folder / "samples")
                self.queue = StepQueue(
                    self.folder, self.samples, self.checkpoints, self._publish,
                    trainer_failure=lambda: self.trainer_failure or None, max_staleness=self.staleness,
                )  # fmt: skip
                self._task = self.loop.create_task(self.queue.run())
                self.loop.go_on(SOON)
            if not self.process.is_dead:
                return
            self._end()

    def _end(self) -> None:
        """Its tasks end, and its files are closed, as the system does for the dead."""
        with self.process.at_work():
            self.loop.end_all()
        journal = self.samples._journal
        journal._close()
        for reader in journal._readers.values():
            os.close(reader)
        journal._readers.clear()

    def kill(self, torn: float = 1.0, dies: int | None = None) -> None:
        """The process dies as it stands; the next one comes."""
        self.process.is_dead = True
        self._end()
        self.start(torn, dies)

    def close(self) -> None:
        """The run is over, however it came to that."""
        self.process.is_dead = True
        self._end()
        self.loop.close()

    def go_on(self, seconds: float) -> None:
        """Everything runs for so long."""
        with self.process.at_work():
            self.loop.go_on(seconds)

    def lose_machine(self, back: int) -> None:
        """The run goes on elsewhere from a step that is at home, one of the newest; as durable.py has it."""
        names = self.checkpoints.names()
        if not names:
            return
        self.process.is_dead = True
        self._end()
        old, name = self.folder, names[-1 - back % len(names)]
        state = self.checkpoints.load(name).state
        self.machine += 1
        self._begin_machine()
        shutil.copytree(old / "checkpoints" / name, self.checkpoints.root / name)
        if (old / empty_steps.FILE).exists():
            shutil.copy(old / empty_steps.FILE, self.folder)
        step = int(name.removeprefix("step-"))
        self.rewound = step, state["client_state"]
        content = {"to_step": step, "reused_after": step, "client_state": state["client_state"], "time": 0.0}
        (self.folder / rewind.FILE).write_text(json.dumps(content))
        after = {line["key"]: line["after"] for line in read_lines(self.folder / empty_steps.FILE)}
        for one in self.asked:  # what was lost is known no longer
            if one.number != step:
                one.number = None
            if one.empty is not None and after[one.key] > step:
                one.empty = None
        self.place, self.committed = step, {step}
        self.start()

    # ------------------------------------------------------------- trainer and engines

    async def _publish(self, checkpoint: Checkpoint) -> dict[str, Any]:
        while self.engines == "wait":
            await asyncio.sleep(SOON)
        if self.process.is_dead or self.engines == "full":
            raise OSError(errno.ENOSPC, "No space left on device")
        if self.engines == "refuse":
            raise NotPublishedError("the engines refuse it")
        assert not self.published or checkpoint.version >= self.published[-1], "served in order"
        self.published.append(checkpoint.version)
        return {"version": checkpoint.version}

    def train(self, fails: bool) -> bool:
        """What the trainer does with the next step, if it is there: as next_step.py chooses it."""
        number = newest_step(self.checkpoints) + 1
        while (self.batch(number) / FAILED).exists():
            number += 1
        if not self.batch(number).exists():
            return False
        meta = json.loads((self.batch(number) / META).read_text())
        if not fails and meta["kind"] == "restore":
            try:
                self.checkpoints.load(meta["from"])
            except CheckpointError:
                fails = True
        if fails:
            write_json(self.batch(number) / FAILED, {"error": "out of memory"})
            return True
        kept = {name: meta[name] for name in ("client_state", "key", "request_sha256", "kind")}
        state = {"counts": meta.get("counts", {}), "metrics": {"loss": 0.5}, **kept}
        self.checkpoints.commit(number, number, state, write_weights)
        self.committed.add(number)
        self.checkpoints.prune(KEPT, {checkpoint_name(one) for one in self.published[-1:]})
        return True

    def batch(self, number: int) -> Path:
        return step_folder(self.folder / "steps", number)

    # ------------------------------------------------------------- the user's program

    def roll_out(self, name: str, back: int) -> None:
        """One more answer, of a version that is served or was a while ago."""
        version = max(0, max(self.published, default=0) - back)
        with self.process.at_work():
            sampled(self.samples, name, version)
        if name not in self.rollouts:
            self.rollouts.append(name)

    def send(self, steps: list[Asked]) -> None:
        """All at once; each answer is one that its user may count on, or none came."""
        queued = self.queue.queued
        free = {one.key: self._free(one) for one in steps}
        new = [one for one in steps if not one.is_known]
        tasks = list[asyncio.Task[StepStatus]]()
        with self.process.at_work():
            tasks = [self.loop.create_task(self._submit(one)) for one in steps]
            while not (self.process.is_dead or all(task.done() for task in tasks)):
                self.loop.go_on(SOON)
        self.asked += [one for one in steps if one not in self.asked]
        if self.process.is_dead:
            return  # whatever was answered then was not heard
        ends = [(one, task.exception(), task) for one, task in zip(steps, tasks, strict=True)]
        for one, error, task in ends:
            if error is None:
                self._answered(one, task.result())
        for one, error, _ in ends:
            others = [other for other in steps if other is not one]
            still = self._free(one, others)
            certain = {sample: reward for sample, reward in free[one.key].items() if sample in still}
            if one in new and one.empty is not None and not one.empty.id:
                assert len(set(certain.values())) < 2, "it had something to teach"
            elif error is not None and not isinstance(error, OSError):
                self._refused(one, error, queued + len(steps), certain)
        self.observe()

    async def _submit(self, one: Asked) -> StepStatus:
        if one.request is not None:
            return await self.queue.submit(one.request)
        return await self.queue.restore(one.restores, one.key, one.client_state)

    def _answered(self, one: Asked, status: StepStatus) -> None:
        assert status.key == one.key
        if one.empty is not None:
            assert status == one.empty, "the same key, the same answer"
        elif one.number is not None:
            assert status.id == one.number, "the same key, the same step"
            (listed,) = [it for it in self.queue.list() if it.id == one.number]
            assert status.state not in ENDED or listed.state == status.state, "by key as by number"
        elif status.state == "empty":
            one.empty = status
        else:
            assert all(other.number != status.id for other in self.asked), "a number is given once"
            one.number = status.id

    def _refused(self, one: Asked, error: BaseException, queued: int, certain: dict[str, float]) -> None:
        """A refusal has its reason, and nothing of the step is kept: its key is free."""
        assert not one.is_known, f"{error}, and it was taken in before"
        assert one.key not in {status.key for status in self.queue.list()}
        if isinstance(error, QueueFullError):
            assert queued > MAX_QUEUED
        elif isinstance(error, NothingToTrainError):
            assert one.request is not None and not certain
        elif isinstance(error, RewoundError):
            assert self._has_unknown(one) and (error.step, error.client_state) == self.rewound
        else:
            assert isinstance(error, UnknownCheckpointError), error
            assert one.restores and one.restores not in self.checkpoints.names()
        self.asked.remove(one)

    def send_other_body(self, one: Asked) -> None:
        """A key that has an answer takes no other body."""
        other = {"at": -1}
        sent = Asked(one.key, one.request and one.request.model_copy(update={"client_state": other}))
        sent.restores, sent.client_state = one.restores, other
        with self.process.at_work():
            task = self.loop.create_task(self._submit(sent))
            self.loop.go_on(SOON)
        assert self.process.is_dead or isinstance(task.exception(), KeyReusedError)

    # ------------------------------------------------------------- what the test knows

    def _free(self, one: Asked, others: Iterable[Asked] = ()) -> dict[str, float]:
        """The samples of a step that surely no other has and that are young enough, with their rewards."""
        found = dict[str, float]()
        open_ones = [
            it for it in self.asked
            if it is not one and it.empty is None and (it.number is None or it.number not in self.ended)
        ]  # fmt: skip
        busy = {name for it in (*open_ones, *others) for name, _ in it.members}
        for name, reward in one.members:
            for ref in self.samples.of_rollout(name):
                if name not in busy and ref.id not in self.owner and self.age(ref.version) <= self.staleness:
                    found.setdefault(ref.id, reward)
        return found

    def _has_unknown(self, one: Asked) -> bool:
        return any(name and not self.samples.knows(name) for name, _ in one.members)

    def age(self, version: int, number: int = 1 << 30) -> int:
        """The steps that were committed since a version, before the step of that number."""
        return sum(version < one < number for one in self.committed)

    def observe(self) -> None:
        """What can be seen is remembered, and agrees with what was seen before."""
        assert not self._task.done(), self._task
        listed = {status.id: status for status in self.queue.list()}
        first = min(listed, default=1)
        assert list(listed) == list(range(first, first + len(listed))), "no number is left out"
        keys = {status.key: status.id for status in listed.values()}
        assert len(keys) == len(listed)
        for one in self.asked:
            if one.number is None and one.empty is None:
                one.number = keys.get(one.key)  # it was in doubt
            elif one.number is not None:
                assert keys.get(one.key) == one.number, "a step that was taken in is known for good"
        for status in listed.values():
            self._observe_end(status)
        for number in listed:
            self._observe_batch(number, listed)
        place = self._place(self.queue.client_state)
        assert place >= self.place, "nothing puts the program back"
        self.place = place

    def _place(self, state: dict[str, Any] | None) -> float:
        """Whose state a program is shown, by a number that only grows: a step's, or an empty one's after."""
        if state is None:
            return 0.0
        (one,) = [one for one in self.asked if one.client_state == state]
        after = {line["key"]: line["after"] for line in read_lines(self.folder / empty_steps.FILE)}
        if one.key in after:
            return after[one.key] + 0.5
        assert one.number in self.committed, "the state of a step that was committed"
        return one.number

    def _observe_end(self, status: StepStatus) -> None:
        if status.state not in ENDED:
            return
        before = self.ended.get(status.id)
        if before is not None and (before.state != "failed" or before.version is None):
            unlike = {"counts"} if status.state == "failed" else set[str]()  # of what was never trained
            assert status.model_dump(exclude=unlike) == before.model_dump(exclude=unlike), "an end is an end"
        elif before != status:
            assert (status.version is None) == (status.id not in self.committed)
        self.ended[status.id] = status
        if status.version is None:
            self.owner = {sample: step for sample, step in self.owner.items() if step != status.id}

    def _observe_batch(self, number: int, listed: dict[int, StepStatus]) -> None:
        """What the trainer was given, once for each state of its step."""
        status, folder = listed[number], self.batch(number)
        if self._looked_at.get(number) == status.state or (folder / FAILED).exists():
            return
        if not (folder / META).exists():
            return
        self._looked_at[number] = status.state
        meta = json.loads((folder / META).read_text())
        ids = [turn["id"] for one in meta.get("samples", ()) for turn in one["turns"]]
        assert len(set(ids)) == len(ids), "no sample twice in a batch"
        for sample in ids:
            assert self.owner.setdefault(sample, number) == number, "no sample in two steps"
        lags = {int(version): lag for version, lag in meta.get("lags", {}).items()}
        assert lags == {version: self.age(version, number) for version in lags}
        assert max(lags.values(), default=0) <= self.staleness
        if status.version is not None and meta["kind"] == "train":
            counts = status.counts
            assert counts.trained == len(ids) and counts.trained <= counts.samples
            assert counts.trained + sum(counts.dropped.values()) >= counts.samples
        before = [listed[one] for one in listed if one < number]
        assert all(one.state in ENDED or one.id in self.committed for one in before)
        assert sum(one.state not in ENDED for one in before) <= 1, "never two steps ahead"

    # ------------------------------------------------------------- the end

    def finish(self) -> None:
        """Left to itself, with a trainer and engines, every step ends, and the newest is served."""
        self.engines, self.trainer_failure = "serve", ""
        self.process.forget_plans()
        for one in [one for one in self.asked if not one.is_known]:
            self.send([one])  # whoever heard no answer sends it again
        for _ in range(_ROUNDS):
            self.go_on(SOON)
            self.train(fails=False)
            if not self.queue.queued:
                break
        self.go_on(LATER)
        self.observe()
        assert self.queue.queued == 0
        assert all(one.number in self.ended for one in self.asked if one.number is not None)
        newest = newest_step(self.checkpoints)
        assert self.published[-1:] == ([newest] if newest else []), "the newest is served"
        self._train_what_is_left()

    def _train_what_is_left(self) -> None:
        """Samples that no step has trained are free: a step that names them gets them, each once."""
        for place in (0, 1):
            self.roll_out(f"last {place}", 0)
        refs = [ref for name in self.rollouts for ref in self.samples.of_rollout(name)]
        free = [ref for ref in refs if ref.id not in self.owner and self.age(ref.version) <= self.staleness]
        members = [{"sample": ref.id, "reward": float(place)} for place, ref in enumerate(free)]
        content = {"key": "last", "groups": [{"id": "g", "members": members}], "client_state": {"at": -1}}
        last = Asked("last", StepRequest.model_validate(content), client_state={"at": -1})
        self.send([last])
        assert last.number is not None
        self.go_on(SOON)
        assert self.train(fails=False)
        self.go_on(SOON)
        self.observe()
        status = self.ended[last.number]
        assert (status.state, status.counts.trained) == ("published", len(free))
        if self.machine == 0:
            metas = [json.loads((self.batch(one) / META).read_text()) for one in self.committed]
            assert sum(meta["empty"]["steps"] for meta in metas) == self.queue.empty, "each counted once"
