"""DSPy's engine for the run's endpoint: a canonical request out with our tags, a canonical response back.

Neighbours: `lm.py` puts it under a `dspy.LM`, `tagging.py` knows the calling predictor, `grpo_job_context.py`
whether it is trained outside a rollout, `wire.py` carries it. DSPy 3.4 requires this of a custom LM
(`complete(Request) -> Response`; `forward` is deprecated). Each `complete` is one sample. Retries are the
wire's, with one request id, so DSPy's own are off: they would be a second sample under the same rollout (C6).
Knows nothing of adapters, predictors or training.
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
from launcher.client.dspy.grpo_job_context import active_job
from launcher.client.dspy.program_rollout import AnswerRecord, Call, RolloutEnded
from launcher.client.dspy.tagging import begin_call, current_rollout, is_untagged
from launcher.client.dspy.version_names import parse_version
from launcher.client.failures import EndpointLost
from launcher.client.request_bodies import PURPOSE_HEADER, REQUEST_HEADER, VERSION_HEADER
from launcher.client.tracing.rollout import is_in_rollout
from launcher.client.wire import AsyncWire, new_request_id

_PATH = "/v1/chat/completions"
# Parameters that change the sampled distribution from the policy's: dropped if a rollout fixes the sampling
# (C9).
_DISTRIBUTION_FIELDS = ("top_p", "top_k", "frequency_penalty", "presence_penalty")
DISTRIBUTION_PARAMETERS = frozenset(
    {*_DISTRIBUTION_FIELDS, "min_p", "repetition_penalty", "logit_bias", "typical_p"}
)
# The model before training, on every run: its answers are no samples of the policy.
BASE_MODEL = "base"
# The pieces that DSPy's listeners get: they find a field by reading on, as from a model that streams.
_WORDS_AND_SPACES = re.compile(r"\s*(?:\w+|[^\w\s]+)|\s+")
# Statuses of errors that another try would not change; the runtime also uses one for a request that crashes
# its engine.
_REQUEST_ERROR_STATUSES = frozenset({400, 413, 422})
_ENGINE_FAILED = "request_failed"
# A program that swallows even RolloutEnded and asks on should not do so at full speed.
_PAUSE_SECONDS = 0.5


def is_base_name(model: str) -> bool:
    """Whether a name, with LiteLLM's prefix or Arbor's or without, is that of the model before training."""
    return model.rpartition("/")[2].rpartition(":")[2] == BASE_MODEL


@dataclass(frozen=True)
class _PreparedRequest:
    """A request ready for the wire."""

    body: bytes
    headers: dict[str, str]
    call: Call | None
    model: str


class _ChatTranslator:
    """Canonical ↔ chat completions, with vLLM's spellings; shared by both engines."""

    def __init__(self, connection: Connection, extra_body: dict[str, Any] | None = None) -> None:
        self.connection = connection
        self.extra_body = dict(extra_body or {})
        self._chat = lm15.OpenAIChatLM(
            api_key="the wire adds it", base_url=connection.base_url, compat="vllm"
        )
        self._lock = threading.Lock()
        self.untagged_requests = 0

    def prepare(self, request: lm15.Request) -> _PreparedRequest:
        rollout = current_rollout()
        of_policy = request.model != BASE_MODEL or (rollout is not None and rollout.uses_base)
        call = begin_call() if of_policy else None
        if of_policy and is_untagged():
            with self._lock:
                self.untagged_requests += 1
        sampling, purpose = _sampling_and_headers(call, self.connection)
        override = None if call is None else call.rollout.model
        if override is not None and (override == BASE_MODEL or request.model == self.connection.model):
            request = replace(request, model=override)
        body = json.loads(self._chat.build_request(_with_sampling(request, sampling), stream=False).body)
        if request.config.top_k is not None and not sampling:
            body["top_k"] = request.config.top_k  # the dialect drops it; vLLM takes it
        extra = self.extra_body
        if sampling:
            extra = {key: value for key, value in extra.items() if key not in DISTRIBUTION_PARAMETERS}
        headers = {"content-type": "application/json", REQUEST_HEADER: new_request_id(), **purpose}
        if call is not None:
            headers |= call.headers
        return _PreparedRequest(json.dumps(body | extra).encode(), headers, call, request.model)

    def parse(self, request: lm15.Request, sent: _PreparedRequest, response: httpx.Response) -> lm15.Response:
        if response.is_error:
            error = self._chat.normalize_error(response.status_code, response.text)  # pyrefly: ignore[bad-argument-type]
            if not _is_request_error(error, response.status_code):
                _note_endpoint_error(
                    sent.call, f"HTTP {response.status_code}: {error.message.partition(chr(10))[0]}"
                )
            raise error
        try:
            answer = lm15.response_from_openai_chat(response.json(), model=request.model)
        except (ValueError, lm15.LM15Error) as error:
            _note_endpoint_error(sent.call, f"unreadable answer: {error}")
            raise lm15.ServerError(f"the endpoint's answer is not a chat completion: {error}") from error
        version = response.headers.get(VERSION_HEADER, "")
        named = parse_version(sent.model)
        if named and version.isdecimal() and version != named:
            _note_endpoint_error(sent.call, f"asked for {sent.model}, but version {version} answered")
            raise lm15.ServerError(f"asked for {sent.model}, but version {version} of the policy answered")
        if sent.call is not None:
            sent.call.rollout.note_answer(sent.call, _answer_record(answer, version))
        return answer


def _sampling_and_headers(
    call: Call | None, connection: Connection
) -> tuple[Mapping[str, Any], dict[str, str]]:
    """The sampling of a request; and the header for requests outside a rollout, which are never trained
    (C48)."""
    if call is not None:
        return call.sampling, {}
    if is_in_rollout(connection):
        return {}, {}  # it is tagged as it is sent
    job = active_job()
    return ({}, {PURPOSE_HEADER: "eval"}) if job is None else (job.sampling_overrides, {})


def _split_text_deltas(events: Iterable[Any]) -> Iterator[Any]:
    """The same events with each text in pieces; the other fields of an event stay with its first piece."""
    for event in events:
        if event.type != "delta" or event.delta.type != "text":
            yield event
            continue
        first, *others = _WORDS_AND_SPACES.findall(event.delta.text) or [""]
        yield replace(event, delta=replace(event.delta, text=first))
        for piece in others:
            yield replace(event, delta=replace(event.delta, text=piece, logprobs=(), logprobs_complete=True))


def _with_sampling(request: lm15.Request, sampling: Mapping[str, Any]) -> lm15.Request:
    if not sampling:
        return request
    fields: dict[str, Any] = {**dict.fromkeys(_DISTRIBUTION_FIELDS), **sampling}
    return replace(request, config=replace(request.config, **fields))


def _answer_record(answer: lm15.Response, version: str) -> AnswerRecord:
    return AnswerRecord(
        version=int(version) if version.isdecimal() else None,
        empty=not answer.text and not answer.tool_calls,
        cut_off=answer.finish_reason == "length",
        tokens=answer.usage.output_tokens,
        repeated=repeated_share(answer.text or ""),
    )


def _is_request_error(error: lm15.LM15Error, status: int) -> bool:
    """Whether the endpoint is well and refuses the program's request: too long a prompt, an image.

    A failure of the engine itself is not one: it tells nothing about the policy (C22).
    """
    return status in _REQUEST_ERROR_STATUSES and error.provider_code != _ENGINE_FAILED


def _note_endpoint_error(call: Call | None, reason: str) -> None:
    if call is not None:
        call.rollout.note_endpoint_error(reason)


def _transport_error(call: Call | None, error: EndpointLost) -> lm15.TransportError:
    if call is not None:
        call.rollout.note_endpoint_error(str(error), is_unreachable=True)
    return lm15.TransportError(str(error))


@dataclass
class PolicyEngine:
    """The sync engine, over the run's connections. Copies of its LM share it."""

    connection: Connection
    extra_body: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._translator = _ChatTranslator(self.connection, self.extra_body)

    @property
    def untagged_requests(self) -> int:
        """Requests so far outside any rollout that were not meant to be so."""
        return self._translator.untagged_requests

    def complete(self, request: lm15.Request) -> lm15.Response:
        """One sample. Raises lm15's errors: TransportError when the endpoint stays away, else by status."""
        try:
            sent = self._translator.prepare(request)
        except RolloutEnded:
            time.sleep(_PAUSE_SECONDS)
            raise
        try:
            response = self.connection.wire.send("POST", _PATH, sent.body, sent.headers)
        except EndpointLost as error:
            raise _transport_error(sent.call, error) from error
        return self._translator.parse(request, sent, response)

    def stream(self, request: lm15.Request) -> Iterator[Any]:
        """The whole answer as events, word by word: rollouts need it whole, DSPy's listeners read along."""
        return _split_text_deltas(lm15.response_to_events(self.complete(request)))

    def to_async(self) -> AsyncPolicyEngine:
        """Its counterpart for `acall`."""
        return AsyncPolicyEngine(
            self._translator, AsyncWire(self.connection.endpoint, self.connection.patience)
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> PolicyEngine:
        return self  # a copied program talks to the same endpoint through the same pool


class AsyncPolicyEngine:
    """The async engine: the same requests from async programs."""

    def __init__(self, translator: _ChatTranslator, wire: AsyncWire) -> None:
        self._translator = translator
        self._wire = wire

    async def complete(self, request: lm15.Request) -> lm15.Response:
        """See `PolicyEngine.complete`."""
        try:
            sent = self._translator.prepare(request)
        except RolloutEnded:
            await asyncio.sleep(_PAUSE_SECONDS)
            raise
        try:
            response = await self._wire.send("POST", _PATH, sent.body, sent.headers)
        except EndpointLost as error:
            raise _transport_error(sent.call, error) from error
        return self._translator.parse(request, sent, response)

    async def stream(self, request: lm15.Request) -> AsyncIterator[Any]:
        """See `PolicyEngine.stream`."""
        for event in _split_text_deltas(lm15.response_to_events(await self.complete(request))):
            yield event

    async def aclose(self) -> None:
        await self._wire.aclose()

    def __deepcopy__(self, memo: dict[int, Any]) -> AsyncPolicyEngine:
        return self
