"""Reads the engine's answers: takes the sampled tokens out, and gives the client the fields it asked for.

Neighbours: proxy.py feeds it; the samples go to samples.py. Pure: no sockets. One class per form an answer
comes in (whole, streamed); both fill the same `Choice`s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from runtime.gateway.completions import echo
from runtime.gateway.completions.prefix_continuation import ChatTurn
from runtime.gateway.completions.request_parsing import ParsedRequest
from runtime.gateway.engines.engine_client import UNKNOWN, EngineFacts
from runtime.gateway.http.openai_errors import ApiError
from runtime.gateway.requests import distribution
from runtime.gateway.samples import content_key, parsed_fields
from runtime.gateway.samples.journal import Sample
from runtime.gateway.samples.samples import why_not_trainable
from runtime.shared.event_streams import OPENAI_END

# Fields that we request beyond the client's, and those that vLLM adds empty.
_IDS = ("prompt_token_ids", "token_ids")
_EMPTY = (
    "prompt_logprobs", "prompt_text", "kv_transfer_params", "ec_transfer_params", "metrics", "routed_experts",
)  # fmt: skip
# Why a sample is none of the policy.
_OF_BASE = "answer of the model before training"


@dataclass
class Choice:
    """One completion while it is collected."""

    prompt_ids: list[int] = field(default_factory=list)
    completion_ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    finish_reason: str | None = None
    thought: str = ""
    has_output: bool = False
    text: str = ""
    # Place → the parts of a call's name and of its arguments that have come.
    calls: dict[int, tuple[list[str], list[str]]] = field(default_factory=dict)
    # How many of the next logprobs are an echoed prompt's; None before the first come.
    echoed: int | None = None

    def take(self, request: ParsedRequest, choice: dict[str, Any]) -> None:
        """Add the content of one choice, or of a part of one."""
        self.prompt_ids += choice.get("prompt_token_ids") or ()
        if self.echoed is None:
            self.echoed = len(self.prompt_ids) if request.echoes_logprobs else 0
        if echo.samples_nothing(request.body):
            choice["token_ids"] = []
        self.completion_ids += choice.get("token_ids") or ()
        given = _logprobs(request, choice)
        self.logprobs += given[self.echoed :]
        self.echoed = max(self.echoed - len(given), 0)
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        message = choice.get("message", choice.get("delta"))
        message = {} if message is None else message
        self._thought_as_content(message)
        self.text += message.get("content") or ""
        for place, call in enumerate(message.get("tool_calls") or ()):
            self._take_call(call.get("index", place), call.get("function") or {})

    @property
    def all_calls(self) -> list[content_key.Call]:
        """The calls it makes, whole."""
        return [content_key.Call(*map("".join, parts)) for _, parts in sorted(self.calls.items())]

    def visible_calls(self, request: ParsedRequest) -> list[content_key.Call]:
        """The calls that its client is given."""
        return self.all_calls[:1] if request.one_call else self.all_calls

    def _take_call(self, place: int, part: dict[str, Any]) -> None:
        name, arguments = self.calls.setdefault(place, ([], []))
        name.append(part.get("name") or "")
        arguments.append(part.get("arguments") or "")

    def _thought_as_content(self, message: dict[str, Any]) -> None:
        """Turn an answer that ended by itself and was wholly a thought into content, in place.

        The engine calls it a thought if no thought ended in it: a model that thinks did not, or the model
        never does (engine/parsers.py). A program that reads only the content would see no answer at all. In a
        stream the parts sent as a thought stay so, and its last event has the content.
        """
        self.has_output |= bool(message.get("content") or message.get("tool_calls"))
        if self.has_output:
            return
        self.thought += message.get("reasoning") or ""
        if self.finish_reason == "stop" and self.thought:
            message["content"] = self.thought
            self.has_output = True


def _logprobs(request: ParsedRequest, choice: dict[str, Any]) -> list[float | None]:
    given = choice.get("logprobs")
    if not given:
        return []
    if request.kind == "chat":
        return [token.get("logprob") for token in given.get("content") or ()]
    return list(given.get("token_logprobs") or ())


def samples(
    request: ParsedRequest,
    choices: dict[int, Choice],
    engine: EngineFacts = UNKNOWN,
    turn: ChatTurn | None = None,
    of_base: bool = False,
    repeats_grammars: Callable[[], bool] = distribution.never,
) -> tuple[list[list[int]], list[Sample]]:
    """Prompts (each once) and samples of a finished answer, in the order of the choices.

    `of_base`: the model before training was asked by its name. It is no policy: a judge, an opponent.
    `repeats_grammars`: the trainer can repeat a request's grammar with this model.
    """
    prompts: list[list[int]] = []
    found: list[Sample] = []
    for index, choice in sorted(choices.items()):
        if not prompts or prompts[-1] != choice.prompt_ids:
            prompts.append(choice.prompt_ids)
        why_not = _OF_BASE if of_base else None
        if why_not is None:
            why_not = why_not_trainable(
                request.body, choice.completion_ids, choice.logprobs, repeats_grammars=repeats_grammars
            )
        if why_not is None:
            why_not = _prompt_not_trainable(choice.prompt_ids, engine)
        name, calls = _content(request, choice), choice.visible_calls(request)
        found.append(
            Sample(
                id=_sample_id(request, index),
                prompt=len(prompts) - 1,
                completion_ids=choice.completion_ids,
                logprobs=choice.logprobs,
                finish_reason=_finish_reason(request, choice, engine),
                unscorable=why_not,
                content=name,
                around="" if name is None else content_key.surrounding_whitespace(choice.text),
                turn=None if turn is None else turn.answered(choice.text, calls),
                has_more_calls=len(choice.calls) > len(calls),
            )
        )
    return prompts, found


def _sample_id(request: ParsedRequest, index: int) -> str:
    return f"{request.id}:{index}"


def _prompt_not_trainable(prompt_ids: list[int], engine: EngineFacts) -> str | None:
    """The reason a prompt must not be trained on; None if it may.

    A template that writes the first token and a tokenizer that adds it give two: the policy would learn to
    answer prompts it never meets elsewhere (C3).
    """
    if not prompt_ids:
        return "prompt ids missing"
    doubled = engine.first_token is not None and prompt_ids[:2] == [engine.first_token] * 2
    return "doubled BOS" if doubled else None


def _finish_reason(request: ParsedRequest, choice: Choice, engine: EngineFacts) -> str | None:
    """The way it ended. vLLM also reports "tool_calls" for an answer that made a call and was then cut off;
    one that ended by itself at the very limit counts as cut off."""
    if choice.finish_reason != "tool_calls":
        return choice.finish_reason
    limit = request.body.get("max_completion_tokens") or request.body.get("max_tokens") or math.inf
    if engine.context_length is not None:
        limit = min(limit, engine.context_length - len(choice.prompt_ids))
    return "length" if len(choice.completion_ids) >= limit else choice.finish_reason


def _content(request: ParsedRequest, choice: Choice) -> str | None:
    """The name by content of an untagged answer."""
    if request.kind != "chat" or request.tags.rollout is not None:
        return None
    return content_key.key(request.body["messages"], choice.text, choice.all_calls)


def question(request: ParsedRequest) -> list[Any] | None:
    """The question, for the record, if a client may name it by its parsed fields."""
    is_named_by_content = request.kind == "chat" and request.tags.rollout is None
    if not is_named_by_content or request.tags.purpose != "train":
        return None
    messages = request.body["messages"]
    return messages if parsed_fields.may_have(messages) else None


def _add_sample_name(request: ParsedRequest, choice: dict[str, Any], version: int | None) -> None:
    """Add to a whole choice its sample's name and version, by which it can be rewarded."""
    if version is not None:
        choice["slipway"] = {"sample": _sample_id(request, choice["index"]), "version": version}


def _strip(request: ParsedRequest, body: dict[str, Any], model: str) -> None:
    """Keep the requested parts only, under the versioned name."""
    body["model"] = model
    choices = body.get("choices") or ()
    for part in (body, *choices):
        if not request.wants_ids:
            for name in _IDS:
                part.pop(name, None)
        for name in _EMPTY:
            if name in part and part[name] is None:
                del part[name]
        if request.body.get("prompt_logprobs") is None:  # an echo has them among the logprobs
            part.pop("prompt_logprobs", None)
    for choice in choices:
        if not request.wants_logprobs and "logprobs" in choice:
            choice["logprobs"] = None
        if request.one_call:
            _keep_first_call(choice.get("message", choice.get("delta")) or {})


def _keep_first_call(message: dict[str, Any]) -> None:
    """Keep, in place, only the first call of a message, or of a part of one in a stream."""
    if calls := message.pop("tool_calls", None):
        first = [call for place, call in enumerate(calls) if call.get("index", place) == 0]
        message |= {"tool_calls": first} if first else {}


def _copy(body: dict[str, Any], copies: int) -> None:
    """Give each (part of a) choice so many times, and count its tokens as often: in place."""
    if copies == 1:
        return
    body["choices"] = [
        choice | {"index": choice["index"] * copies + copy}
        for choice in body.get("choices") or ()
        for copy in range(copies)
    ]
    if usage := body.get("usage"):
        usage["completion_tokens"] = copies * (usage.get("completion_tokens") or 0)
        usage["total_tokens"] = (usage.get("prompt_tokens") or 0) + usage["completion_tokens"]


class WholeAnswer:
    """A whole (not streamed) answer. `version`: the version in the names; None: its choices have no names.
    `echoed`: the texts of the prompts, if it begins with them."""

    def __init__(
        self,
        request: ParsedRequest,
        model: str,
        answer: bytes,
        version: int | None = None,
        echoed: Sequence[str] = (),
    ) -> None:
        """Raises ApiError(502) when the engine's 200 holds no answer."""
        try:
            body = msgspec.json.decode(answer)
            given = body["choices"]
        except (msgspec.DecodeError, KeyError, TypeError) as error:
            raise ApiError(502, "the engine's answer is not a completion") from error
        if not given:
            raise ApiError(502, "the engine's answer has no choices")
        _copy(body, request.copies)
        self.choices: dict[int, Choice] = {}
        for choice in body["choices"]:
            collected = self.choices[choice["index"]] = Choice(list(body.get("prompt_token_ids") or ()))
            collected.take(request, choice)
            if request.kind == "chat":
                _never_null(choice["message"])
            echo.put_before(choice, echoed, request.choices_of_a_prompt)
            _add_sample_name(request, choice, version)
        _strip(request, body, model)
        self.body = msgspec.json.encode(body)


def _never_null(message: dict[str, Any]) -> None:
    """A message without content gets an empty text: null reads as "no answer"."""
    if message.get("content") is None and not message.get("tool_calls"):
        message["content"] = ""


class StreamedAnswer:
    """A streamed answer (server-sent events), event by event. A choice's last event has its name, its first
    its prompt if that is `echoed`."""

    def __init__(
        self, request: ParsedRequest, model: str, version: int | None = None, echoed: Sequence[str] = ()
    ) -> None:
        self._request = request
        self._echoed = echoed
        self._model = model
        self._version = version
        self._rest = b""
        self._prompt_ids: list[int] = []
        self.choices: dict[int, Choice] = {}
        self.done = False
        self.error: bytes | None = None

    @property
    def has_finished(self) -> bool:
        """Every choice so far has its finish reason: nothing is to come, or another choice."""
        return bool(self.choices) and all(choice.finish_reason for choice in self.choices.values())

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The events, as the client gets them, that end in this piece of the engine's stream."""
        *events, self._rest = (self._rest + data).split(b"\n\n")
        for event in events:
            if event.startswith(b"data: "):
                yield self._event(event[6:])

    def _event(self, payload: bytes) -> bytes:
        if payload.strip() == b"[DONE]":
            self.done = True
            return OPENAI_END
        body = msgspec.json.decode(payload)
        if "error" in body:
            self.error = payload
            return b""
        _copy(body, self._request.copies)
        self._prompt_ids = body.get("prompt_token_ids") or self._prompt_ids
        for choice in body.get("choices") or ():
            collected = self.choices.get(choice["index"])
            if collected is None:
                collected = self.choices[choice["index"]] = Choice(list(self._prompt_ids))
                echo.put_before(choice, self._echoed, self._request.choices_of_a_prompt)
            collected.take(self._request, choice)
            if choice.get("finish_reason"):
                _add_sample_name(self._request, choice, self._version)
        _strip(self._request, body, self._model)
        return b"data: " + msgspec.json.encode(body) + b"\n\n"
