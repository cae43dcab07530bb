"""Which sampling settings leave the policy's whole distribution to be sampled from (C9).

A behaviour logprob is comparable with the trainer's only if every token could have been sampled, at a known
temperature. Settings that cut or bend the distribution make a sample unscorable, with the setting as reason.
What only ends an answer (stop strings, stop tokens, a length, repetition noticed) or only changes its text
leaves the distribution as it is. Every field that passes the gateway was tried against the engine's own
scores (tests/runtime/test_recorded_answers.py).
Neighbours: samples.py asks once per request. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

# vLLM raises a temperature between 0 and this to it, so the recorded one would be wrong.
LOWEST_TEMPERATURE = 0.01
DEFAULT_TEMPERATURE = 1.0


def _absent(value: Any) -> bool:
    return not value


def _is(*neutral: float) -> Callable[[Any], bool]:
    return lambda value: value in neutral


# Setting → whether a value leaves the distribution as it is. None (not set) always does.
_NEUTRAL: dict[str, Callable[[Any], bool]] = {
    "top_p": _is(1),
    "top_k": _is(0, -1),
    "min_p": _is(0),
    "presence_penalty": _is(0),
    "frequency_penalty": _is(0),
    "repetition_penalty": _is(1),
    "min_tokens": _is(0),  # forbids the end of text until then
    "use_beam_search": _absent,
    "watermarking": _absent,
    "logit_bias": _absent,
    "bad_words": _absent,
    "allowed_token_ids": _absent,
    "structured_outputs": _absent,
    "vllm_xargs": _absent,
    "thinking_token_budget": lambda value: False,
    "response_format": lambda value: value.get("type") == "text" if isinstance(value, Mapping) else False,
}


def temperature(settings: Mapping[str, Any]) -> float:
    """The temperature a request samples at."""
    given = settings.get("temperature")
    return DEFAULT_TEMPERATURE if given is None else float(given)


def cut_by(settings: Mapping[str, Any]) -> str | None:
    """The first setting that changes the support, or None. `greedy` stands for a temperature of 0."""
    if temperature(settings) < LOWEST_TEMPERATURE:
        return "greedy"
    for name, neutral in _NEUTRAL.items():
        value = settings.get(name)
        if value is not None and not neutral(value):
            return name
    return _cut_by_tools(settings)


def grammar(settings: Mapping[str, Any]) -> str | None:
    """The first setting by which the engine holds the answer to a grammar, or None."""
    for name in ("structured_outputs", "response_format"):
        value = settings.get(name)
        if value is not None and not _NEUTRAL[name](value):
            return name
    return _cut_by_tools(settings)


def _cut_by_tools(settings: Mapping[str, Any]) -> str | None:
    """The first setting by which vLLM holds a call of a tool to a grammar.

    With "auto" it does so where a tool is strict, and where the calls are limited to one: the limit is kept
    by a grammar for the whole call. With "none" the tools are only shown to the model.
    """
    choice = settings.get("tool_choice")
    if choice == "none":
        return None
    if choice not in (None, "auto"):
        return "tool_choice"
    tools = settings.get("tools") or ()
    if isinstance(tools, list) and any(_is_strict(tool) for tool in tools):
        return "tools"
    return "parallel_tool_calls" if tools and settings.get("parallel_tool_calls") is False else None


def _is_strict(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return isinstance(function, Mapping) and bool(function.get("strict"))
