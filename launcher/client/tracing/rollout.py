"""One rollout of a program in any SDK: its requests to the run within its block carry the rollout's name.

    with run.rollout() as r:
        answer = agent(question)  # OpenAI's SDK, httpx, LiteLLM, LangChain
    r.reward = judge(answer)
    run.step([group("q1", [r, ...])])

Which block a request is in is a context variable: it goes with tasks, with `asyncio.to_thread`, with threads
that are given a copied context (`contextvars.copy_context().run`), and with no others.
Neighbours: `Session.rollout` makes these, `http_patch.py` shows the requests, `sampling_request.py` finds
their run. Knows nothing of DSPy, whose own `launcher.client.rollout` also tells a program's predictors apart.
"""

from __future__ import annotations

import re
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self
from urllib.parse import quote

from launcher.base.sanitize import plain_text as sanitized
from launcher.client.connection import Connection
from launcher.client.groups import finite
from launcher.client.request_bodies import PREDICTOR_HEADER, PURPOSE_HEADER, ROLLOUT_HEADER, Member
from launcher.client.tracing.http_patch import HttpPatch, HttpRequest
from launcher.client.tracing.sampling_request import match_sampling_request

# "refuse": a request whose answer could not be trained is refused, and not answered and counted.
_UNTRAINABLE_HEADER = "x-slipway-untrainable"

Purpose = Literal["train", "eval"]
Untrainable = Literal["count", "refuse"]

# The characters of a name that fits into a header and a path.
_NAME = re.compile(r"(?! )[ -.0-~]{1,128}")

_UNTAGGED_WARNING = (
    "a request came to the run from outside every rollout while one was open, so no reward reaches it. "
    "A thread belongs to the rollout where it runs in contextvars.copy_context().run. They are run.astray"
)
_NO_REQUEST_WARNING = (
    "a rollout has asked the run nothing. Is base_url of its client the run's, and does it send by httpx or "
    "aiohttp? Any other client is tagged by its address: base_url=r.base_url"
)


class TracedRun:
    """A run that this process uses. `untagged_requests`: those in no rollout while one was open."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.untagged_requests = 0

    @property
    def root(self) -> str:
        """The run's address."""
        return self.connection.endpoint.root


class Rollout:
    """Made by `Session.rollout`. It may be entered again, to go on, and in several threads at once.

    `reward`: yours to set, also if the block ended by an exception: the samples stay. A text instead is the
    reason for no reward. `failed`: the exception that the last block ended by, in words. `requests`: the
    number of those that were tagged.
    """

    def __init__(
        self,
        run: TracedRun,
        rollout_id: str,
        predictor: str | None = None,
        purpose: Purpose = "train",
        untrainable: Untrainable = "count",
    ) -> None:
        """Raises ValueError for a name that no request can carry."""
        if not _NAME.fullmatch(rollout_id):
            raise ValueError(f"a rollout's name has 1 to 128 ASCII characters and no '/': {rollout_id!r}")
        self.run = run
        self.id = rollout_id
        self.predictor = predictor
        self.purpose: Purpose = purpose
        self.untrainable: Untrainable = untrainable
        self.reward: float | str | None = None
        # Other figures of it, shown beside its reward.
        self.metrics: dict[str, float] = {}
        self.failed: str | None = None
        self.requests = 0
        self._blocks = 0
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Rollout({self.id!r}, reward={self.reward!r}, requests={self.requests})"

    @property
    def base_url(self) -> str:
        """The address that tags every request through it with this rollout's name alone, for any client."""
        return self.run.connection.rollout_url(self.id)

    @property
    def samples(self) -> list[str]:
        """The names of its answers, as `slipway.sample` in each has them; the run is asked."""
        return [it["sample"] for it in samples_of(self.run.connection, self.id)]

    @property
    def is_open(self) -> bool:
        """Whether a block of it is open somewhere."""
        return self._blocks > 0

    @property
    def headers(self) -> dict[str, str]:
        """The headers of each of its requests."""
        headers = {ROLLOUT_HEADER: self.id}
        if self.predictor is not None:
            headers[PREDICTOR_HEADER] = self.predictor
        if self.purpose == "eval":
            headers[PURPOSE_HEADER] = "eval"
        if self.untrainable == "refuse":
            headers[_UNTRAINABLE_HEADER] = "refuse"
        return headers

    def member(self) -> Member:
        """Its part in a group. An evaluation, or without a reward, it is left out, and counted so."""
        if self.purpose == "eval":  # answers that were tagged by the address alone do not carry the purpose
            return Member(rollout=self.id, failure="evaluation")
        if self.reward is None or isinstance(self.reward, str):
            # Members are counted by it: the exception's kind, whose words may be other ones each time.
            why = f"ended by {self.failed.partition(':')[0]}" if self.failed else "no reward"
            return Member(rollout=self.id, failure=self.reward or why, metrics=finite(self.metrics))
        return Member(rollout=self.id, reward=float(self.reward), metrics=finite(self.metrics))

    # ------------------------------------------------------------- the block

    def __enter__(self) -> Self:
        _http_patch.acquire()
        with self._lock:
            self._blocks += 1
        _open_runs.add(self.run)
        _innermost.set(_Block(self, _innermost.get()))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        _exit_block(self)
        _open_runs.remove(self.run)
        with self._lock:
            self._blocks -= 1
        # In words alone: an exception would keep alive all that its frames hold.
        self.failed = None if error is None else f"{type(error).__name__}: {error}"
        _http_patch.release()
        if error is None and not self.requests:
            _log_once(self.run, _NO_REQUEST_WARNING)

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, where)

    def count(self) -> None:
        """One more request is sent in its name."""
        with self._lock:
            self.requests += 1


@dataclass(frozen=True)
class _Block:
    """A rollout in force, and the block around it."""

    rollout: Rollout
    outer: _Block | None


_innermost: ContextVar[_Block | None] = ContextVar("slipway_block", default=None)


def _rollouts_in_force() -> Iterator[Rollout]:
    """The rollouts in force here, from the inside out."""
    block = _innermost.get()
    while block is not None:
        yield block.rollout
        block = block.outer


def is_in_rollout(connection: Connection) -> bool:
    """Whether requests to this run are tagged here. Elsewhere `PolicyLM` marks its own as evaluation."""
    return any(it.is_open and it.run.root == connection.endpoint.root for it in _rollouts_in_force())


def samples_of(connection: Connection, rollout: str) -> list[dict[str, Any]]:
    """See `Session.samples_of`."""
    return connection.get_json(f"/slipway/rollouts/{quote(rollout, safe='')}/samples")


def _exit_block(rollout: Rollout) -> None:
    """Take the innermost block of this rollout off. A generator may end in another context: there is none."""
    kept: list[Rollout] = []
    block = _innermost.get()
    while block is not None and block.rollout is not rollout:
        kept.append(block.rollout)
        block = block.outer
    if block is None:
        return
    left = block.outer
    for one in reversed(kept):
        left = _Block(one, left)
    _innermost.set(left)


class _OpenRuns:
    """The runs with an open block in this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: dict[int, TracedRun] = {}
        self._blocks: Counter[int] = Counter()

    def add(self, run: TracedRun) -> None:
        with self._lock:
            self._runs[id(run)] = run
            self._blocks[id(run)] += 1

    def remove(self, run: TracedRun) -> None:
        with self._lock:
            self._blocks[id(run)] -= 1
            if not self._blocks[id(run)]:
                del self._blocks[id(run)], self._runs[id(run)]

    def count_untagged(self, request: HttpRequest) -> None:
        """Count a request that is in no block on each run that it asks."""
        with self._lock:
            runs = [it for it in self._runs.values() if _is_untagged(request, it)]
            for run in runs:
                run.untagged_requests += 1
        for run in runs:
            _log_once(run, _UNTAGGED_WARNING)


_open_runs = _OpenRuns()
_logged: set[tuple[str, str]] = set()


def _log_once(run: TracedRun, text: str) -> None:
    """Log a text once for a run in this process."""
    if (run.root, text) not in _logged:
        _logged.add((run.root, text))
        sys.stderr.write(f"slipway: {sanitized(text)}\n")
        sys.stderr.flush()


@contextmanager
def _tag_request(request: HttpRequest) -> Iterator[None]:
    """The request with its rollout's headers while it is sent, and without them again.

    A redirected request then carries nothing of ours, unless it goes to the run as well.
    """
    headers = _headers_for(request)
    added = [name for name in headers if name not in request.headers]
    for name in added:
        request.headers[name] = headers[name]
    try:
        yield
    finally:
        for name in added:
            request.headers.pop(name, None)


def _headers_for(request: HttpRequest) -> dict[str, str]:
    for rollout in _rollouts_in_force():
        match = match_sampling_request(rollout.run.root, request)
        if match is None:
            continue
        named = match.rollout or request.headers.get(ROLLOUT_HEADER)
        if named is not None and named != rollout.id:
            return {}  # the request names its own rollout
        if not rollout.is_open:
            break  # a task or thread that has outlived its block
        rollout.count()
        return rollout.headers
    _open_runs.count_untagged(request)
    return {}


def _is_untagged(request: HttpRequest, run: TracedRun) -> bool:
    """Whether it goes to this run, without a rollout and without the mark of an evaluation."""
    match = match_sampling_request(run.root, request)
    if match is None or match.rollout is not None:
        return False
    return ROLLOUT_HEADER not in request.headers and PURPOSE_HEADER not in request.headers


_http_patch = HttpPatch(_tag_request)
