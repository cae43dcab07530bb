"""DSPy's engine for the run's endpoint: a canonical request out with our tags, a canonical response back.

Neighbours: `lm.py` puts it under a `dspy.LM`, `tagging.py` says who is calling, `sampling_live.py` whether it
is trained outside a rollout, `wire.py` carries it.
DSPy 3.4 asks this of a custom LM (`complete(Request) -> Response`; `forward` is deprecated). Each `complete`
is one sample. Retries are the wire's, with one request id, so DSPy's own are off: they would be a second
sample under the same rollout (C6). Knows nothing of adapters, predictors or training.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
from dspy import lm15

from launcher.client.alarms import repeated_share
from launcher.client.connection import Connection
from launcher.client.dspy.naming import version_in
from launcher.client.dspy.program_rollout import Answered, Call, RolloutOver
from launcher.client.dspy.sampling_live import for_training
from launcher.client.dspy.tagging import astray, begin_call, current_rollout
from launcher.client.failures import EndpointLost
from launcher.client.schema import PURPOSE_HEADER, REQUEST_HEADER, VERSION_HEADER
from launcher.client.tracing.rollout import is_in_rollout
from launcher.client.wire import AsyncWire, new_request_id

_PATH = "/v1/chat/completions"
# What makes the sampled distribution another than the policy's: dropped where a rollout fixes the sampling
# (C9).
_SUPPORT = ("top_p", "top_k", "frequency_penalty", "presence_penalty")
SUPPORT_EXTRAS = frozenset({*_SUPPORT, "min_p", "repetition_penalty", "logit_bias", "typical_p"})
# The model before training, on every run: what is asked of it is no sample of the policy.
BASE_MODEL = "base"
# What DSPy's listeners are given at a time: they find a field by reading on, as from a model that streams.
_PIECES = re.compile(r"\s*(?:\w+|[^\w\s]+)|\s+")
# Statuses of what no other try would change; and the runtime's code for a request that its engine fails at.
_OF_THE_REQUEST = frozenset({400, 413, 422})
_ENGINE_FAILED = "request_failed"
# A program that swallows even RolloutOver and asks on should not do so at full speed.
_PAUSE_SECONDS = 0.5


@dataclass(frozen=True)
class _Sent:
    """A request ready for the wire."""

    body: bytes
    headers: dict[str, str]
    call: Call | None
    model: str


class _Dialect:
    """Canonical ↔ chat completions, with vLLM's spellings; what both engines share."""

    def __init__(self, connection: Connection, extra_body: dict[str, Any] | None = None) -> None:
        self.connection = connection
        self.extra_body = dict(extra_body or {})
        self._chat = lm15.OpenAIChatLM(
            api_key="the wire adds it", base_url=connection.base_url, compat="vllm"
        )
        self._lock = threading.Lock()
        self.astray = 0

    def send(self, request: lm15.Request) -> _Sent:
        rollout = current_rollout()
        of_policy = request.model != BASE_MODEL or (rollout is not None and rollout.of_base)
        call = begin_call() if of_policy else None
        if of_policy and astray():
            with self._lock:
                self.astray += 1
        sampling, purpose = _how(call, self.connection)
        instead = None if call is None else call.rollout.model
        if instead is not None and (instead == BASE_MODEL or request.model == self.connection.model):
            request = replace(request, model=instead)
        body = json.loads(self._chat.build_request(_shaped(request, sampling), stream=False).body)
        if request.config.top_k is not None and not sampling:
            body["top_k"] = request.config.top_k  # the dialect drops it; vLLM takes it
        extra = self.extra_body
        if sampling:
            extra = {key: value for key, value in extra.items() if key not in SUPPORT_EXTRAS}
        headers = {"content-type": "application/json", REQUEST_HEADER: new_request_id(), **purpose}
        if call is not None:
            headers |= call.headers
        return _Sent(json.dumps(body | extra).encode(), headers, call, request.model)

    def receive(self, request: lm15.Request, sent: _Sent, response: httpx.Response) -> lm15.Response:
        if response.is_error:
            error = self._chat.normalize_error(response.status_code, response.text)
            if not _is_of_the_request(error, response.status_code):
                _note_lost(sent.call, f"HTTP {response.status_code}: {error.message.partition(chr(10))[0]}")
            raise error
        try:
            answer = lm15.response_from_openai_chat(response.json(), model=request.model)
        except (ValueError, lm15.LM15Error) as error:
            _note_lost(sent.call, f"unreadable answer: {error}")
            raise lm15.ServerError(f"the endpoint's answer is not a chat completion: {error}") from error
        version = response.headers.get(VERSION_HEADER, "")
        named = version_in(sent.model)
        if named and version.isdecimal() and version != named:
            _note_lost(sent.call, f"asked for {sent.model}, but version {version} answered")
            raise lm15.ServerError(f"asked for {sent.model}, but version {version} of the policy answered")
        if sent.call is not None:
            sent.call.rollout.note_answer(sent.call, _answered(answer, version))
        return answer


def _how(call: Call | None, connection: Connection) -> tuple[Mapping[str, Any], dict[str, str]]:
    """How a request is sampled; and the header of what no rollout asks, which is never trained (C48)."""
    if call is not None:
        return call.sampling, {}
    if is_in_rollout(connection):
        return {}, {}  # it is tagged as it is sent
    job = for_training()
    return ({}, {PURPOSE_HEADER: "eval"}) if job is None else (job.asked, {})


def _in_pieces(events: Iterable[Any]) -> Iterator[Any]:
    """The same events with each text in pieces; what else rides on a text stays with its first."""
    for event in events:
        if event.type != "delta" or event.delta.type != "text":
            yield event
            continue
        first, *others = _PIECES.findall(event.delta.text) or [""]
        yield replace(event, delta=replace(event.delta, text=first))
        for piece in others:
            yield replace(event, delta=replace(event.delta, text=piece, logprobs=(), logprobs_complete=True))


def _shaped(request: lm15.Request, sampling: Mapping[str, Any]) -> lm15.Request:
    if not sampling:
        return request
    return replace(request, config=replace(request.config, **dict.fromkeys(_SUPPORT), **sampling))


def _answered(answer: lm15.Response, version: str) -> Answered:
    return Answered(
        version=int(version) if version.isdecimal() else None,
        empty=not answer.text and not answer.tool_calls,
        cut_off=answer.finish_reason == "length",
        tokens=answer.usage.output_tokens,
        repeated=repeated_share(answer.text or ""),
    )


def _is_of_the_request(error: lm15.LM15Error, status: int) -> bool:
    """Whether the endpoint is well and refuses what the program asks: too long a prompt, an image.

    What the engine itself fails at is none of these: it says nothing about the policy (C22).
    """
    return status in _OF_THE_REQUEST and error.provider_code != _ENGINE_FAILED


def _note_lost(call: Call | None, reason: str) -> None:
    if call is not None:
        call.rollout.note_lost(reason)


def _lost(call: Call | None, error: EndpointLost) -> lm15.TransportError:
    if call is not None:
        call.rollout.note_lost(str(error), gone=True)
    return lm15.TransportError(str(error))


@dataclass
class PolicyEngine:
    """The sync engine, over the run's connections. Copies of its LM share it."""

    connection: Connection
    extra_body: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._dialect = _Dialect(self.connection, self.extra_body)

    @property
    def astray(self) -> int:
        """Requests so far that came from where no rollout is known, nor meant to be."""
        return self._dialect.astray

    def complete(self, request: lm15.Request) -> lm15.Response:
        """One sample. Raises lm15's errors: TransportError when the endpoint stays away, else by status."""
        try:
            sent = self._dialect.send(request)
        except RolloutOver:
            time.sleep(_PAUSE_SECONDS)
            raise
        try:
            response = self.connection.wire.send("POST", _PATH, sent.body, sent.headers)
        except EndpointLost as error:
            raise _lost(sent.call, error) from error
        return self._dialect.receive(request, sent, response)

    def stream(self, request: lm15.Request) -> Iterator[Any]:
        """The whole answer as events, word by word: rollouts need it whole, DSPy's listeners read along."""
        return _in_pieces(lm15.response_to_events(self.complete(request)))

    def asynchronous(self) -> AsyncPolicyEngine:
        """Its counterpart for `acall`."""
        return AsyncPolicyEngine(self._dialect, AsyncWire(self.connection.endpoint, self.connection.patience))

    def __deepcopy__(self, memo: dict[int, Any]) -> PolicyEngine:
        return self  # a copied program talks to the same endpoint through the same pool


class AsyncPolicyEngine:
    """The async engine: the same requests from async programs."""

    def __init__(self, dialect: _Dialect, wire: AsyncWire) -> None:
        self._dialect = dialect
        self._wire = wire

    async def complete(self, request: lm15.Request) -> lm15.Response:
        """See `PolicyEngine.complete`."""
        try:
            sent = self._dialect.send(request)
        except RolloutOver:
            await asyncio.sleep(_PAUSE_SECONDS)
            raise
        try:
            response = await self._wire.send("POST", _PATH, sent.body, sent.headers)
        except EndpointLost as error:
            raise _lost(sent.call, error) from error
        return self._dialect.receive(request, sent, response)

    async def stream(self, request: lm15.Request) -> AsyncIterator[Any]:
        """See `PolicyEngine.stream`."""
        for event in _in_pieces(lm15.response_to_events(await self.complete(request))):
            yield event

    async def aclose(self) -> None:
        await self._wire.aclose()

    def __deepcopy__(self, memo: dict[int, Any]) -> AsyncPolicyEngine:
        return self
