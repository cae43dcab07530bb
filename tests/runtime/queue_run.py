"""A run for tests of the client whose samples, claims and steps are the gateway's own; no engine, no trainer.

Its texts are ids letter by letter, so that a conversation that is sent again goes on from the one before, id
for id. A step is committed as soon as the queue has handed it over, unless `held` stops it; groups whose
rewards are all the same are counted as the trainer does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from runtime.gateway.completions import request_parsing
from runtime.gateway.completions.answers import WholeAnswer
from runtime.gateway.http.step_errors import KeyReusedError, NothingToTrainError
from runtime.gateway.samples.samples import SampleStore
from runtime.gateway.steps.queue import StepQueue
from runtime.shared.batch import read_batch
from runtime.shared.checkpoint import ADAPTER_WEIGHTS, Checkpoint, CheckpointStore
from runtime.shared.schema import StepRequest
from tests.runtime.recorded import answer, choice, record_choices
from tests.support.small_counts import FLAT
from tests.support.small_run import Asked, SmallRun

FAILED = "failed.json"  # of a step that trains nothing
_SECONDS = 30.0
_WAIT_SECONDS = 1.0
_LOOK_SECONDS = 0.01
_ASSISTANT, _END = 1, 2
_Result = TypeVar("_Result")


@dataclass
class QueueRun(SmallRun):
    """`state` is the run's folder on its machine. What was asked for evaluation says so by its header."""

    state: Path = field(kw_only=True)
    # Set: a step that the queue has handed over is not committed.
    held: threading.Event = field(default_factory=threading.Event)
    # Why the trainer has failed, if it has.
    trouble: str | None = None
    # Before and after a step is taken in, in the thread of its request.
    before_step: threading.Event | None = None
    after_step: threading.Event | None = None
    # Which of them somebody waits at.
    reached: list[str] = field(default_factory=list)
    submitted: list[StepRequest] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.samples = SampleStore(self.state / "samples")
        self.checkpoint_store = CheckpointStore(self.state / "checkpoints")
        self.queue = StepQueue(
            self.state, self.samples, self.checkpoint_store, self._publish,
            trainer_failure=lambda: self.trouble, max_staleness=2,
        )  # fmt: skip
        self.steps = _Steps(self)
        self.lock = contextlib.nullcontext()  # type: ignore[assignment] - a step is waited for beside the rest
        self._recording = threading.Lock()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._tasks = [
            asyncio.run_coroutine_threadsafe(it, self._loop) for it in (self.queue.run(), self._commit())
        ]
        super().__post_init__()

    def close(self) -> None:
        super().close()
        for task in self._tasks:
            task.cancel()
        asyncio.run_coroutine_threadsafe(self._ended(), self._loop).result(_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _ended(self) -> None:
        """What was cancelled has ended."""
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*others, return_exceptions=True)

    def trained(self) -> dict[int, list[str]]:
        """By step, the samples that the trainer was given."""
        found = {}
        for folder in sorted((self.state / "steps").glob("[0-9]*")):
            samples = json.loads((folder / "batch.json").read_text())["samples"]
            found[int(folder.name)] = [turn["id"] for one in samples for turn in one["turns"]]
        return found

    # ------------------------------------------------------------- as the small run

    def complete(self, asked: Asked) -> tuple[int, dict[str, Any], dict[str, str]]:
        text = self.answer(asked)
        assert isinstance(text, str)
        prompt = [it for message in asked.body["messages"] for it in _ids(message)] + [_ASSISTANT]
        ids = [*map(ord, text), _END]
        content = answer(prompt, choice(ids, [-0.5] * len(ids), text))
        with self._recording:
            self.asked.append(asked)
            request = request_parsing.parse_request(
                "chat", asked.headers, None, json.dumps(asked.body).encode()
            )
            whole = WholeAnswer(request, f"policy@v{self.version}", content, version=self.version)
            raw = msgspec.Raw(whole.body)
            record_choices(self.samples, request, whole.choices, raw, self.version, delivered=True)
        return 200, json.loads(whole.body), {"x-slipway-policy-version": str(self.version)}

    def step(self, request: StepRequest) -> tuple[int, dict[str, Any]]:
        self._pass("before", self.before_step)
        self.submitted.append(request)
        try:
            status = self.on_loop(self.queue.submit(request))
        except KeyReusedError as error:
            return 409, {"error": {"message": str(error), "code": "key_reused"}}
        except NothingToTrainError as error:
            told = {"message": str(error), "code": "nothing_to_train", "counts": error.counts.model_dump()}
            return 422, {"error": told}
        self._pass("after", self.after_step)
        return 202, status.model_dump(mode="json")

    def status(self) -> dict[str, Any]:
        """Of one instant, as the gateway's: no step ends between two of its parts."""
        return self.on_loop(self._status())

    async def _status(self) -> dict[str, Any]:
        own = {"client_state": self.queue.client_state, "steps_queued": self.queue.queued}
        return super().status() | own

    def _last_metrics(self) -> dict[str, float]:
        return self.queue.last_metrics

    def wait(self, number: int) -> dict[str, Any]:
        """A step's status, once it has ended or has not for a while."""
        return self.on_loop(self.queue.wait(number, _WAIT_SECONDS)).model_dump(mode="json")

    # ------------------------------------------------------------- the trainer's part

    async def _commit(self) -> None:
        done: set[str] = set()
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            for folder in sorted((self.state / "steps").glob("[0-9]*")):
                if folder.name not in done and not self.held.is_set() and not (folder / FAILED).exists():
                    done.add(folder.name)
                    self._commit_one(folder, int(folder.name))

    def _commit_one(self, folder: Path, number: int) -> None:
        meta = read_batch(folder).meta
        kept = {name: meta[name] for name in ("client_state", "key", "request_sha256", "kind")}
        state = {"counts": self._flat_dropped(folder, meta["counts"]), "metrics": {"loss": 0.5}, **kept}
        self.checkpoint_store.commit(number, number, state, _write_weights)

    def _flat_dropped(self, folder: Path, counts: dict[str, Any]) -> dict[str, Any]:
        batch = read_batch(folder)
        rewards: dict[int, set[float]] = {}
        for group, reward in zip(batch.group, batch.reward, strict=True):
            rewards.setdefault(int(group), set()).add(float(reward))
        flat = sum(
            len(sample["turns"])
            for sample, member in zip(batch.meta["samples"], batch.member, strict=True)
            if len(rewards[int(batch.group[member])]) < 2
        )
        dropped = counts["dropped"] | ({FLAT: flat} if flat else {})
        return counts | {"trained": counts["trained"] - flat, "dropped": dropped}

    async def _publish(self, checkpoint: Checkpoint) -> dict[str, Any]:
        self.version = checkpoint.version
        return {"version": checkpoint.version}

    def on_loop(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_SECONDS)

    def _pass(self, name: str, gate: threading.Event | None) -> None:
        if gate is not None:
            self.reached.append(name)
            assert gate.wait(_SECONDS)


class _Steps(dict[int, dict[str, Any]]):
    """The queue's, as the small run asks for them."""

    def __init__(self, run: QueueRun) -> None:
        self._run = run

    def get(self, number: int, _: Any = None) -> dict[str, Any]:  # type: ignore[override]
        return self._run.wait(number) if number else {}


def _ids(message: dict[str, Any]) -> list[int]:
    """A message by its letters; an assistant's begins and ends as a sampled one does."""
    text = [ord(it) for it in message["content"]]
    if message["role"] == "assistant":
        return [_ASSISTANT, *text, _END]
    return [3, *text]


def _write_weights(folder: Path) -> None:
    (folder / ADAPTER_WEIGHTS).parent.mkdir()
    (folder / ADAPTER_WEIGHTS).write_bytes(b"weights")
