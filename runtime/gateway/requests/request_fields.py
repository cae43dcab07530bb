"""The table of an OpenAI request's fields: those that may reach an engine, and those that distort the
sampling.

Neighbours: the gateway calls `check` before it forwards; tools.py adjusts tools; distribution.py asks the
table whether a sample is fit for training. Knows nothing of HTTP, samples or vLLM. Each line was tried
against a running vLLM 0.32 on CPU (tests/runtime/test_engine_fields.py tries them again), distorting ones
against the engine's own scores (tests/runtime/test_recorded_answers.py). An unknown field is refused, since
vLLM ignores it without a word.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from runtime.gateway.requests import tools

Action = Literal["pass", "drop", "refuse"]
# "tokens": a completion of token ids, whose limits are a chat's.
Kind = Literal["chat", "completion", "tokens"]
Body = dict[str, Any]

_MAX_CHOICES = 128  # OpenAI's bound; vLLM's own is 16,384
# The smallest above 0 that vLLM samples at. It raises a smaller one to this, silently. So do we: what is
# recorded is then the temperature that was sampled at.
MIN_TEMPERATURE = 0.01
_INT64 = 2**63
# Deeper than any tool's schema; Python's own JSON reader in vLLM ends at about 1,000 with a 500.
_MAX_DEPTH = 64


_TOO_DEEP = f"nested more than {_MAX_DEPTH} deep"


class BadField(ValueError):  # noqa: N818 - the name of the thing, not of an event
    """A field the engines must not get: 400. `param` is its name, `message` the reason."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param
        self.message = message


@dataclass(frozen=True)
class FieldRule:
    """The handling of one field. `neutral`: values without an effect, dropped while others are refused."""

    action: Action
    reason: str = ""
    neutral: tuple[Any, ...] = ()
    # None: on every device.
    device: Literal["cpu", "cuda"] | None = None
    # Whether a value leaves every token of the policy's distribution as likely as before; None: every value
    # does.
    keeps_distribution: Callable[[Any], bool] | None = None


def _unless(*neutral: float) -> FieldRule:
    """Passes, and bends the distribution with any other value."""
    return FieldRule("pass", keeps_distribution=lambda value: value in neutral)


def _is_text(form: Any) -> bool:
    return form.get("type") == "text" if isinstance(form, Mapping) else False


_PASS = FieldRule("pass")
_BENDS = FieldRule("pass", keeps_distribution=lambda value: not value)
_NO_EFFECT = FieldRule("drop", "meant for OpenAI's servers; has no effect here")
_IGNORED_BY_ENGINE = "vLLM 0.32 ignores it silently: use structured_outputs or response_format"
_INTERNAL = "moves data between engines; not for clients"
_NO_MEDIA = FieldRule("refuse", "the policy reads text only")
_NO_ECHO = FieldRule(
    "refuse",
    "an answer contains only sampled text: prepend your prompt yourself; prompt_logprobs has its "
    "logprobs, return_token_ids its ids",
    neutral=(False,),
)

SAMPLING: dict[str, FieldRule] = {
    "model": _PASS,
    "max_tokens": _PASS,
    "temperature": _PASS,
    "n": _PASS,
    "stop": _PASS,
    "stop_token_ids": _PASS,
    "include_stop_str_in_output": _PASS,
    "stream": _PASS,
    "stream_options": _PASS,
    "stream_interval": _PASS,
    "top_p": _unless(1),
    "top_k": _unless(0, -1),
    "min_p": _unless(0),
    "presence_penalty": _unless(0),
    "frequency_penalty": _unless(0),
    "repetition_penalty": _unless(1),
    "repetition_detection": _PASS,
    "min_tokens": _unless(0),  # forbids the end of text until then
    "logit_bias": _BENDS,
    "bad_words": _BENDS,
    "allowed_token_ids": _BENDS,
    "ignore_eos": _PASS,
    "structured_outputs": _BENDS,
    "response_format": FieldRule("pass", keeps_distribution=_is_text),
    "logprobs": _PASS,
    "prompt_logprobs": _PASS,
    "logprob_token_ids": _PASS,
    "return_token_ids": _PASS,
    "return_tokens_as_token_ids": _PASS,
    "skip_special_tokens": _PASS,
    "spaces_between_special_tokens": _PASS,
    "add_special_tokens": _PASS,
    "truncate_prompt_tokens": _PASS,
    "truncation_side": _PASS,
    "cache_salt": _PASS,
    "seed": FieldRule(
        "drop",
        "kills vLLM 0.32's CPU engine as soon as a seeded prompt is prefilled in two chunks "
        "('CPU Generator does not use offset'), and every request with it",
        device="cpu",
    ),
    "user": _NO_EFFECT,
    "metadata": _NO_EFFECT,
    "store": _NO_EFFECT,
    "service_tier": _NO_EFFECT,
    "safety_identifier": _NO_EFFECT,
    "prompt_cache_key": _NO_EFFECT,
    "prompt_cache_retention": _NO_EFFECT,
    "priority": FieldRule("drop", "the engines take requests in order of arrival"),
    "request_id": FieldRule("drop", "the gateway names requests"),
    "session_id": FieldRule("drop", "rollouts are named by header or path"),
    "return_token_offsets": FieldRule("drop", "answered by vLLM's render routes only"),
    # As many as `n` are all there are to choose from: then it asks for nothing (_is_default).
    "best_of": FieldRule("refuse", "vLLM 0.32 ignores it silently: ask for n, with logprobs, and choose"),
    "use_beam_search": FieldRule("refuse", "beams are not samples of the policy", neutral=(False,)),
    "length_penalty": FieldRule("refuse", "belongs to beam search", neutral=(1, 1.0)),
    "watermarking": FieldRule("refuse", "changes what is sampled", neutral=(False,)),
    "thinking_token_budget": FieldRule("refuse", "ends thoughts with tokens that the policy did not sample"),
    "logits_processors": FieldRule("refuse", "would run client code in the engine", neutral=([],)),
    "guided_json": FieldRule("refuse", _IGNORED_BY_ENGINE),
    "guided_regex": FieldRule("refuse", _IGNORED_BY_ENGINE),
    "guided_choice": FieldRule("refuse", _IGNORED_BY_ENGINE),
    "guided_grammar": FieldRule("refuse", _IGNORED_BY_ENGINE),
    "prompt_embeds": FieldRule("refuse", "training needs token ids"),
    "kv_transfer_params": FieldRule("refuse", _INTERNAL),
    "ec_transfer_params": FieldRule("refuse", _INTERNAL),
    "vllm_xargs": FieldRule("refuse", _INTERNAL + "; some values make vLLM fail with a 500", neutral=({},)),
    "routed_experts_prompt_start": FieldRule("refuse", _INTERNAL, neutral=(0,)),
    "mm_payload": _NO_MEDIA,
    "return_mm_kwargs": _NO_MEDIA,
}

CHAT: dict[str, FieldRule] = SAMPLING | {
    "messages": _PASS,
    "max_completion_tokens": _PASS,
    "top_logprobs": _PASS,
    "tools": _PASS,
    "tool_choice": _PASS,
    "parallel_tool_calls": _PASS,
    "add_generation_prompt": _PASS,
    "continue_final_message": _PASS,
    "chat_template_kwargs": _PASS,
    "documents": _PASS,
    "reasoning_effort": _PASS,
    "include_reasoning": FieldRule(
        "drop",
        "without it vLLM would hide the ids and logprobs of the whole answer",
    ),
    "return_prompt_text": _PASS,
    "echo": _NO_ECHO,
    "chat_template": FieldRule("refuse", "training uses the model's own template"),
    "media_io_kwargs": _NO_MEDIA,
    "mm_processor_kwargs": _NO_MEDIA,
    "audio": _NO_MEDIA,
    "modalities": FieldRule("refuse", "the policy reads and writes text only", neutral=(["text"],)),
    "prediction": FieldRule("drop", "a speed hint that the engines do not support"),
    "verbosity": _NO_EFFECT,
    "web_search_options": FieldRule("refuse", "the engines have no network access"),
    "functions": FieldRule("refuse", "vLLM 0.32 ignores it silently: use tools", neutral=([],)),
    "function_call": FieldRule("refuse", "vLLM 0.32 ignores it silently: use tool_choice", neutral=("none",)),
}

COMPLETION: dict[str, FieldRule] = SAMPLING | {
    "prompt": _PASS,
    "echo": _PASS,
    "suffix": FieldRule("refuse", "needs a model trained to fill in the middle", neutral=("",)),
}


def check(kind: Kind, body: Body, device: str) -> Body:
    """The body as an engine may see it. Pure. Raises BadField."""
    rules = CHAT if kind == "chat" else COMPLETION
    kept: Body = {}
    for name, value in body.items():
        rule = rules.get(name)
        if value is None:  # an SDK's way to send nothing, in any field
            continue
        if rule is None:
            raise BadField(name, f"{name[:80]!r} is not a field of this route")
        if rule.device not in (None, device):
            rule = _PASS
        if rule.action == "drop" or value in rule.neutral or _is_default(name, body):
            continue
        if rule.action == "refuse":
            raise BadField(name, f"{name!r} is not served: {rule.reason}")
        check_content(name, value)
        kept[name] = value
    _check_values(kept)
    if "temperature" in kept:
        kept["temperature"] = sampled_temperature(kept["temperature"])
    return _strict_tools(kept)


def sampled_temperature(given: float) -> float:
    """The temperature that a request which gives this one is sampled at; 0 is greedy."""
    return max(given, MIN_TEMPERATURE) if given > 0 else given


def _is_default(name: str, body: Body) -> bool:
    """Whether the value is the default, given the other fields."""
    return name == "best_of" and body["best_of"] in (1, body.get("n"))


def _strict_tools(body: Body) -> Body:
    try:
        return tools.with_strict_tools(body)
    except tools.NotAnObjectError as error:
        raise BadField("tools", str(error)) from error


def ignored_fields(kind: Kind, body: Body, device: str) -> tuple[str, ...]:
    """Fields that would have an effect on another device and have none on this one."""
    dropped = _dropped_only_on(kind, device)
    return tuple(name for name in body if name in dropped and body[name] is not None)


@functools.cache
def _dropped_only_on(kind: Kind, device: str) -> frozenset[str]:
    """The fields by the whole table, which is the same for every request."""
    rules = CHAT if kind == "chat" else COMPLETION
    return frozenset(name for name, rule in rules.items() if rule.action == "drop" and rule.device == device)


def _check_values(body: Body) -> None:
    temperature = body.get("temperature", 1.0)
    if not isinstance(temperature, int | float) or isinstance(temperature, bool):
        raise BadField("temperature", "temperature is a number from 0 to 2")
    choices = body.get("n", 1)
    if not isinstance(choices, int) or not 1 <= choices <= _MAX_CHOICES:
        raise BadField("n", f"n is a whole number from 1 to {_MAX_CHOICES}")
    _check_echo(body)
    for name in ("max_tokens", "max_completion_tokens"):
        if body.get(name) == 0 and not body.get("echo"):
            # For a prompt that fills the context vLLM reports just this.
            raise BadField(name, f"{name} is at least 1")
    if not isinstance(body.get("parallel_tool_calls", True), bool):
        # vLLM would take 0 or "no" for false.
        raise BadField("parallel_tool_calls", "parallel_tool_calls is true or false")
    if not isinstance(body.get("structured_outputs", {}), dict):
        # vLLM's own check of it asks for a key before it asks for the type, and answers 500.
        raise BadField("structured_outputs", "structured_outputs is an object")
    _check_calls(body.get("messages", []))
    if "allowed_token_ids" in body and ("structured_outputs" in body or "response_format" in body):
        # Where they contradict one another vLLM answers 500.
        raise BadField("allowed_token_ids", "allowed_token_ids does not go with a structured answer")


def _check_echo(body: Body) -> None:
    if not isinstance(body.get("echo", False), bool):
        raise BadField("echo", "echo is true or false")
    if body.get("echo") and type(body.get("max_tokens", 1)) is not int:
        raise BadField("max_tokens", "max_tokens is a whole number")
    if body.get("echo") and "truncate_prompt_tokens" in body:
        raise BadField("echo", "echo does not go with truncate_prompt_tokens: the prompt would be another")
    scored = "logprobs" in body or body.get("max_tokens") == 0
    if body.get("echo") and scored and body.get("stream") and body.get("n", 1) > 1:
        # vLLM 0.32 streams a prompt's logprobs once, and fails at the second choice.
        raise BadField("echo", "echo with logprobs is streamed for one choice only: leave out n or stream")


def _check_calls(messages: Any) -> None:
    """The arguments of an earlier tool call are JSON in a text. vLLM reads it, with a 500 if it cannot."""
    for message in messages if isinstance(messages, list) else ():
        calls = message.get("tool_calls") if isinstance(message, dict) else None
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") if isinstance(call, dict) else None
            text = function.get("arguments") if isinstance(function, dict) else None
            if isinstance(text, str):
                try:
                    check_content("messages", msgspec.json.decode(text))
                except msgspec.DecodeError:
                    continue  # its own refusal names the place
                except RecursionError as error:
                    raise BadField("messages", _TOO_DEEP) from error


def check_content(name: str, value: Any, depth: int = 0) -> None:
    """No NaN, no infinity, no integer past 64 bits, no nesting without end: some of them end in a 500.

    Raises BadField.
    """
    if depth > _MAX_DEPTH:
        raise BadField(name, _TOO_DEEP)
    if isinstance(value, float) and not math.isfinite(value):
        raise BadField(name, f"{name!r} holds a number that is not finite")
    if isinstance(value, int) and not -_INT64 <= value < _INT64:
        raise BadField(name, f"{name!r} holds a number past 64 bits")
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            check_content(name, item, depth + 1)
