"""vLLM's `POST /inference/v1/generate`: token ids in, token ids out, for clients with their own tokenizer.

A request is asked as a completion of its ids, so that the rules for completions hold for it. The answer has
vLLM 0.32's form. Its logprobs name each token twice, as `token_id` (0.32) and as `token` (what clients of
earlier versions read). Neighbours: gateway.py mounts the route, endpoint.py asks for each request's
translation. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from starlette.routing import Route

from runtime.gateway.dialects.chat_request import refuse, refuse_fields
from runtime.gateway.dialects.endpoint import DialectEndpoint, Serve
from runtime.shared.event_streams import OPENAI_END

Body = dict[str, Any]

# Fields of vLLM's SamplingParams that a completion has by the same name.
_SAMPLING = frozenset(
    {
        "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k",
        "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "min_tokens", "logprobs",
        "prompt_logprobs", "logprob_token_ids", "skip_special_tokens", "spaces_between_special_tokens",
        "include_stop_str_in_output", "stream_interval", "structured_outputs", "logit_bias",
        "allowed_token_ids", "bad_words", "repetition_detection", "thinking_token_budget", "watermarking",
    }
)  # fmt: skip
# Those without an effect here: the answer's form is this route's, no experts are returned, and what belongs
# to a chat's template or answer the client has done itself. vLLM ignores what it does not know.
_NO_EFFECT = frozenset(
    {
        "detokenize", "flat_logprobs", "output_kind", "routed_experts_prompt_start", "return_token_ids",
        "return_tokens_as_token_ids", "top_logprobs", "reasoning_effort", "parallel_tool_calls",
        "tool_choice", "user",
    }
)  # fmt: skip
_PASSED = ("model", "stream", "stream_options", "cache_salt")
_IGNORED = ("request_id", "priority", "token_offsets", "reasoning_ended", "reasoning_parser_kwargs")
_READ = ("token_ids", "sampling_params", "output_mode", "return_token_ids")
_NO_MEDIA = "the policy reads text only"
_INTERNAL = "moves data between engines; not for clients"
_REFUSED = {
    "features": _NO_MEDIA,
    "content_parts": _NO_MEDIA,
    "kv_transfer_params": _INTERNAL,
    "ec_transfer_params": _INTERNAL,
}
_TOKEN = "token_id:"


class GenerateTranslation:
    """One request and its answer."""

    def __init__(self, body: Body, model: str) -> None:
        """`model`: the one that is meant where the request names none. Raises ApiError."""
        _check(body)
        self._as_text = body.get("output_mode") == "text"
        self._wants_prompt = body.get("return_token_ids") is True
        given = body["sampling_params"]
        self._num_top = given.get("logprobs") or 0
        self.translated = {"model": model} | _completion(body, self._as_text)
        self.ignored = tuple(name for name in _IGNORED if body.get(name)) + tuple(
            name for name in sorted(_NO_EFFECT & given.keys()) if given[name] and name != "detokenize"
        )

    def whole(self, answer: Body) -> Body:
        """The answer to a whole completion's."""
        found = self._common(answer) | {"model": answer["model"], "created": answer["created"]}
        found["choices"] = [self._choice(choice) for choice in answer["choices"]]
        choices = answer["choices"]
        found["prompt_logprobs"] = choices[0].get("prompt_logprobs") if choices else None
        if self._wants_prompt and choices:
            found["prompt_token_ids"] = choices[0].get("prompt_token_ids")
        return found

    def events(self) -> GenerateEvents:
        """Those of a streamed one."""
        return GenerateEvents(self.chunk)

    def chunk(self, chunk: Body, is_first: bool) -> Body:
        """A streamed answer's part."""
        found = self._common(chunk)
        found["choices"] = [self._choice(choice) for choice in chunk["choices"]]
        if self._wants_prompt and is_first and chunk["choices"]:
            found["prompt_token_ids"] = chunk["choices"][0].get("prompt_token_ids")
        return found

    def _common(self, answer: Body) -> Body:
        return {
            "request_id": answer["id"],
            "output_mode": "text" if self._as_text else "tokens",
            "usage": answer.get("usage"),
        }

    def _choice(self, choice: Body) -> Body:
        found: Body = {
            "index": choice["index"],
            "finish_reason": choice.get("finish_reason"),
            "stop_reason": choice.get("stop_reason"),
            "token_ids": choice.get("token_ids") or [],
            "logprobs": self._logprobs(choice),
        }
        if self._as_text:
            found["text"] = choice["text"]
        if "slipway" in choice:
            found["slipway"] = choice["slipway"]
        return found

    def _logprobs(self, choice: Body) -> Body | None:
        given = choice.get("logprobs")
        if given is None:
            return None
        write = _text_logprob if self._as_text else _token_logprob
        tops = given.get("top_logprobs") or [None] * len(given["tokens"])
        content = []
        for token, logprob, top in zip(given["tokens"], given["token_logprobs"], tops, strict=True):
            others = [write(other, value) for other, value in (top or {}).items()]
            shown = others if self._num_top < 0 else others[: max(self._num_top, 1)]
            content.append(write(token, logprob) | {"top_logprobs": shown})
        return {"content": content}


class GenerateEvents:
    """The events of a streamed answer."""

    def __init__(self, chunk: Callable[[Body, bool], Body]) -> None:
        self._chunk = chunk
        self._begun = False

    def feed(self, chunk: Body) -> Iterator[bytes]:
        """Those of one of the completion's."""
        found = self._chunk(chunk, not self._begun)
        self._begun |= bool(chunk["choices"])
        yield _event(found)

    def end(self) -> Iterator[bytes]:
        """The last."""
        yield OPENAI_END

    def failed(self, error: Body) -> Iterator[bytes]:
        """An error in the midst of it."""
        yield _event({"error": error})


def generate_routes(prefix: str, serve: Serve, model: str) -> list[Route]:
    """The route below the server's root, or below a rollout's."""
    endpoint = DialectEndpoint(serve, lambda body: GenerateTranslation(body, model), "tokens")
    return [Route(f"{prefix}/inference/v1/generate", endpoint, methods=["POST"])]


def _check(body: Body) -> None:
    refuse_fields(body, _REFUSED)
    known = {*_PASSED, *_IGNORED, *_READ, *_REFUSED}
    for name in body:
        if name not in known:
            refuse(name[:80], "is not a field of this route")
    ids = body.get("token_ids")
    if not isinstance(ids, list) or not ids or not all(type(token) is int and token >= 0 for token in ids):
        refuse("token_ids", "is a list of token ids")
    if body.get("output_mode", "tokens") not in ("tokens", "text", None):
        refuse("output_mode", 'is "tokens" or "text"')
    given = body.get("sampling_params")
    if not isinstance(given, dict):
        refuse("sampling_params", "is an object")
    if isinstance(given.get("logprobs", 0), bool | str | float):
        refuse("sampling_params[logprobs]", "is a whole number")
    for name, value in given.items():
        if name not in _SAMPLING and name not in _NO_EFFECT and value:
            refuse(f"sampling_params[{name[:80]}]", "is not served")


def _completion(body: Body, as_text: bool) -> Body:
    """The request as a completion of its ids."""
    given = body["sampling_params"]
    completion = {name: body[name] for name in _PASSED if body.get(name) is not None}
    completion |= {name: value for name, value in given.items() if name in _SAMPLING}
    completion |= {"prompt": body["token_ids"], "return_token_ids": True}
    if not as_text:
        completion["return_tokens_as_token_ids"] = True
    return completion


def _token_logprob(token: str, logprob: float | None) -> Body:
    number = int(token.removeprefix(_TOKEN))
    return {"token": token, "token_id": number, "logprob": logprob, "rank": None}


def _text_logprob(token: str, logprob: float | None) -> Body:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode(errors="replace"))}


def _event(body: Body) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
