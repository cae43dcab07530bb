"""The hot path: one completion request, from the client to an engine and back, recorded on the way.

Neighbours: request_parsing.py reads the request, engine_pool.py chooses the engine, answers.py reads the
answer, samples.py records it, in_flight.py hands it to the waiting connections. A request whose engine dies
is sent again when the engine is back; nothing is sampled twice under one request id.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import aiohttp
import msgspec

from runtime.engine.command import model_parsers
from runtime.gateway.completions import echo, request_parsing
from runtime.gateway.completions.answers import Choice, StreamedAnswer, WholeAnswer, question, samples
from runtime.gateway.completions.in_flight import GRACE_SECONDS, Headers, InFlightRequest, InFlightRequests
from runtime.gateway.completions.not_trainable import TrainabilityCheck
from runtime.gateway.completions.prefix_continuation import ChatTurn, PrefixContinuation
from runtime.gateway.completions.request_parsing import ParsedRequest
from runtime.gateway.completions.routing_key import routing_key_of
from runtime.gateway.engines.engine import Engine
from runtime.gateway.engines.engine_client import EngineClient, EngineError, EngineUnreachableError
from runtime.gateway.engines.engine_pool import EnginePool
from runtime.gateway.http import openai_errors
from runtime.gateway.http.openai_errors import ApiError, not_ready
from runtime.gateway.http.warnings import Warnings
from runtime.gateway.requests import distribution
from runtime.gateway.requests.request_fields import Kind
from runtime.gateway.samples.journal import Exchange
from runtime.gateway.samples.samples import SampleStore, StoredRequest
from runtime.gateway.versions.versions import BASE, Served, Versions
from runtime.shared import failpoints
from runtime.shared.headers import IGNORED_HEADER, UNTRAINABLE_HEADER
from runtime.shared.runtime_config import RuntimeConfig
from runtime.shared.schema import VERSION_HEADER

log = logging.getLogger(__name__)

# An engine that died twice under the same request is not asked a third time: the request may be why.
MAX_ENGINE_DEATHS = 2
# One that failed at a request and lives on is asked once more.
MAX_FAILURES = 2


class FieldCheck(Protocol):
    """request_fields.py: the body without the fields that this device refuses or ignores."""

    def __call__(self, kind: Kind, body: dict[str, Any]) -> dict[str, Any]: ...


class EngineGoneError(Exception):
    """The engine died, or has forgotten the version, before it answered."""


class EngineFailedError(Exception):
    """The engine failed at this one request and lives on; the text is its own."""


class Completions:
    """Answers `/v1/chat/completions` and `/v1/completions` (an ASGI application per kind: `endpoint`)."""

    def __init__(
        self,
        pool: EnginePool,
        versions: Versions,
        store: SampleStore,
        check: FieldCheck,
        ignored_fields: Callable[[Kind, dict[str, Any]], tuple[str, ...]],
        config: RuntimeConfig,
        warnings: Warnings,
    ) -> None:
        """`ignored_fields`: the fields of a request that have no effect here; its answer names them."""
        self._pool = pool
        self._versions = versions
        self._store = store
        self._check = check
        self._ignored_fields = ignored_fields
        self._name_samples = config.name_samples
        self._continuing = PrefixContinuation(store, config.continue_turns)
        # Not of a model that thinks: its grammar begins where vLLM's parser sees the end of a thought.
        self._repeats_grammars = functools.cache(lambda: model_parsers(config.model_path).reasoning is None)
        self._untrainable = TrainabilityCheck(warnings, self._repeats_grammars)
        self.in_flight = InFlightRequests()

    def endpoint(self, kind: Kind) -> CompletionEndpoint:
        """The ASGI endpoint of one kind of completion."""
        return CompletionEndpoint(self, kind)

    async def serve(self, kind: Kind, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """One connection's request. Errors are answered here: nothing below the gateway words them."""
        try:
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            path_rollout = scope.get("path_params", {}).get("rollout")
            content = await request_parsing.read_body(receive)
            request = request_parsing.parse_request(kind, headers, path_rollout, content)
            untrainable = self._untrainable.check(request)
            flight = self._in_flight(request)
        except ApiError as error:
            await error.send(send)
            return
        grace_seconds = GRACE_SECONDS if flight.replayable else 0.0
        ignored = (*request.ignored, *self._ignored_fields(kind, request.body))
        send = _with_headers(
            {IGNORED_HEADER: ", ".join(ignored), UNTRAINABLE_HEADER: untrainable or ""}, send
        )
        await flight.deliver(receive, send, grace_seconds)
        if flight.recorded and not (flight.received or flight.has_listeners or request.receipt_follows):
            self._mark_undelivered(request)

    async def render(self, chat: dict[str, Any]) -> list[int]:
        """The ids of a chat request's prompt; nothing is sampled. Raises ApiError."""
        request = request_parsing.parse_request("chat", {}, None, msgspec.json.encode(chat))
        engine = await self.engine_of(request.model)
        try:
            return await engine.render(self._check("chat", request.body))
        except EngineError as error:
            raise engine_refusal(error) from error

    def checked(self, kind: Kind, body: dict[str, Any]) -> dict[str, Any]:
        """A request's body as an engine may see it; nothing is sampled. Raises ApiError."""
        request_parsing.check_form(kind, body)
        return self._check(kind, body)

    async def engine_of(self, model: str) -> EngineClient:
        """An engine that serves this model. Raises ApiError."""
        return (await self._pool.pick(self._versions.resolve(model).version)).client

    def _in_flight(self, request: ParsedRequest) -> InFlightRequest:
        """A new flight, the one already on its way under this id, or the stored answer."""
        seen = self.in_flight.find(request.id) or self._store.stored(request.id)
        if seen is not None and seen.digest != request.digest:
            raise ApiError(
                409,
                f"request id {request.id} was already used for a different request",
                code="request_id_reused",
            )
        if isinstance(seen, InFlightRequest):
            return seen
        if isinstance(seen, StoredRequest):
            return self._replay(request)
        served = self._versions.resolve(request.model)
        flight = self.in_flight.start(
            request.id, request.digest, lambda flight: self._answer(request, served, flight)
        )
        flight.replayable = request.named and not request.streamed
        # Held from this very moment, whatever happens to the task.
        self._versions.acquire(served.version)
        assert flight.task is not None
        flight.task.add_done_callback(lambda _: self._versions.release(served.version))
        return flight

    def _replay(self, request: ParsedRequest) -> InFlightRequest:
        """The stored answer of a request id, as a flight that has already landed."""
        flight = _finished(self._store.answer(request.id))
        flight.received = self._store.is_received(request.id)  # by an earlier connection
        try:
            if not request.receipt_follows:
                self._store.mark_received(request.id)
        except OSError as error:
            raise _not_recorded(error) from error
        return flight

    def _mark_undelivered(self, request: ParsedRequest) -> None:
        """Its client went before it had the whole answer (C52)."""
        try:
            self._store.mark_lost(request.id)
        except OSError as error:
            log.error(
                "request %s: no client received its answer, and this could not be recorded: %s",
                request.id,
                error,
            )

    async def _answer(self, request: ParsedRequest, served: Served, flight: InFlightRequest) -> None:
        body = request.for_engine(served.engine_model, self._check)
        deaths = failures = 0
        failed: Engine | None = None
        while True:
            engine = await self._pool.pick(served.version, routing_key_of(request), failed)
            engine.in_flight += 1
            try:
                turn = await self._continuing.turn(request, body, engine.client)
                await self._ask(engine, request, served, body, turn, flight)
                return
            except EngineGoneError as error:
                self._pool.mark_unreachable(engine)
                deaths += 1
                if flight.has_started or deaths >= MAX_ENGINE_DEATHS:
                    raise not_ready(f"the engine died while answering: {error}") from error
            except EngineFailedError as error:
                failed, failures = engine, failures + 1
                if flight.has_started or failures >= MAX_FAILURES or distribution.grammar(request.body):
                    raise _request_error(request, error) from error
            finally:
                engine.in_flight -= 1

    async def _ask(
        self,
        engine: Engine,
        request: ParsedRequest,
        served: Served,
        body: dict[str, Any],
        turn: ChatTurn | None,
        flight: InFlightRequest,
    ) -> None:
        """One attempt. Raises EngineGoneError when another may be made."""
        content = msgspec.json.encode(body | turn.fields if turn and turn.fields else body)
        try:
            async with engine.client.post(request_parsing.ENGINE_PATHS[request.kind], content) as response:
                if response.status != 200:
                    raise await _refusal(engine, response, served)
                echoed = await _prompt_texts(request, engine)
                if request.streamed:
                    await self._stream(response, request, served, turn, flight, engine, echoed)
                else:
                    content = await response.read()
                    whole = WholeAnswer(request, served.name, content, self._named(served), echoed)
                    answer = msgspec.Raw(whole.body)
                    self._record(request, served, turn, whole.choices, flight, answer, engine)
                    flight.begin(200, _headers(b"application/json", served, len(whole.body)))
                    flight.write(whole.body)
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            raise EngineGoneError(type(error).__name__) from error

    async def _stream(
        self,
        response: aiohttp.ClientResponse,
        request: ParsedRequest,
        served: Served,
        turn: ChatTurn | None,
        flight: InFlightRequest,
        engine: Engine,
        echoed: Sequence[str] = (),
    ) -> None:
        """The end of the last choice is held back and sent with the end of the events, once it is recorded: a
        program that leaves at a finish reason has the whole answer, and the answer is a sample."""
        stream = StreamedAnswer(request, served.name, self._named(served), echoed)
        text: list[bytes] = []
        held: list[bytes] = []
        head = _headers(b"text/event-stream; charset=utf-8", served)
        async for piece in response.content.iter_any():
            for event in stream.feed(piece):
                if stream.error is not None:
                    raise EngineFailedError(openai_errors.from_engine(500, stream.error).message)
                text.append(event)
                held.append(event)
                if stream.done:
                    break
                if not stream.has_finished:
                    _deliver_held(held, head, flight)
        if not stream.done:
            raise EngineGoneError("the stream ended early")
        whole = msgspec.json.encode(b"".join(text).decode())
        self._record(request, served, turn, stream.choices, flight, msgspec.Raw(whole), engine)
        _deliver_held(held, head, flight)

    def _named(self, served: Served) -> int | None:
        """The version in the choices' names; None if they have none."""
        return served.version if self._name_samples else None

    def _record(
        self,
        request: ParsedRequest,
        served: Served,
        turn: ChatTurn | None,
        choices: dict[int, Choice],
        flight: InFlightRequest,
        answer: msgspec.Raw,
        engine: Engine,
    ) -> None:
        """Before the client has the answer: a delivered answer is always recorded."""
        prompts, found = samples(
            request, choices, engine.client.facts, turn, served.name == BASE, self._repeats_grammars
        )
        exchange = Exchange(
            request=request.id,
            digest=request.digest,
            created=time.time(),
            tags=request.tags,
            model=served.name,
            version=served.version,
            temperature=distribution.temperature(request.body),
            settings=request.settings,
            messages=question(request),
            conversation=None if turn is None else turn.conversation,
            prompts=prompts,
            samples=found,
            streamed=request.streamed,
            answer=answer,
            delivered=flight.has_listeners and not request.receipt_follows,
        )
        try:
            failpoints.failpoint("gateway.recording")
            self._store.record(exchange)
        except OSError as error:  # a full disk: an unrecorded answer is not delivered
            raise _not_recorded(error) from error
        flight.recorded = True
        failpoints.failpoint("gateway.recorded")


class CompletionEndpoint:
    """ASGI endpoint of one kind of completion."""

    def __init__(self, completions: Completions, kind: Kind) -> None:
        self._completions = completions
        self._kind: Kind = kind

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        await self._completions.serve(self._kind, scope, receive, send)


def engine_refusal(error: EngineError) -> ApiError:
    """The answer to a request whose prompt an engine did not read."""
    if error.status == 0 or error.status >= 500:
        return not_ready(f"the engine cannot read the prompt now: {error}")
    return openai_errors.from_engine(error.status, error.answer)


async def _prompt_texts(request: ParsedRequest, engine: Engine) -> Sequence[str]:
    """The prompts with which the answer begins; () if it has no echo. Raises EngineGoneError and ApiError."""
    try:
        return await echo.prompt_texts(request.body, engine.client)
    except EngineUnreachableError as error:
        raise EngineGoneError(str(error)) from error
    except EngineError as error:
        raise engine_refusal(error) from error


async def _refusal(engine: Engine, response: aiohttp.ClientResponse, served: Served) -> Exception:
    """The meaning of an engine's error answer: it is gone (ask again), or the client's own mistake (passed
    on)."""
    body = await response.read()
    if response.status == 404:
        return EngineGoneError(f"it does not have {served.engine_model}")
    if response.status >= 500 and not await engine.client.health():
        return EngineGoneError("its core is dead")
    api_error = openai_errors.from_engine(response.status, body)
    return api_error if response.status < 500 else EngineFailedError(api_error.message)


def _request_error(request: ParsedRequest, error: EngineFailedError) -> ApiError:
    """A request that a living engine cannot answer, however often it is asked."""
    if name := distribution.grammar(request.body):
        why = f"{name!r}: its grammar does not compile, or allows no next token"
        return ApiError(400, why, param=name, code="grammar_failed")
    return ApiError(
        400, f"the engine cannot answer this request, but still runs: {error}", code="request_failed"
    )


def _with_headers(added: dict[str, str], send: Any) -> Any:
    """`send` with these headers added to the answer's."""
    headers = [(name.encode(), value.encode()) for name, value in added.items() if value]

    async def naming(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message = message | {"headers": [*message["headers"], *headers]}
        await send(message)

    return naming if headers else send


def _headers(content_type: bytes, served: Served, length: int | None = None) -> Headers:
    headers = [(b"content-type", content_type), (VERSION_HEADER.encode(), str(served.version).encode())]
    if length is not None:
        headers.append((b"content-length", str(length).encode()))
    return headers


def _deliver_held(held: list[bytes], head: Headers, flight: InFlightRequest) -> None:
    """Write the held bytes to the flight, in one piece."""
    if not flight.has_started:
        flight.begin(200, head)
    flight.write(b"".join(held))
    held.clear()


def _not_recorded(error: OSError) -> ApiError:
    return not_ready(f"the answer could not be recorded: {error.strerror or error}")


def _finished(exchange: Exchange) -> InFlightRequest:
    """A flight that has already landed."""
    flight = InFlightRequest(exchange.digest)
    flight.recorded = True
    served = Served(exchange.version, exchange.model, "")
    answer = bytes(exchange.answer)
    if exchange.streamed:
        flight.begin(200, _headers(b"text/event-stream; charset=utf-8", served))
        answer = msgspec.json.decode(answer, type=str).encode()
    else:
        flight.begin(200, _headers(b"application/json", served, len(answer)))
    flight.write(answer)
    flight.end()
    return flight
