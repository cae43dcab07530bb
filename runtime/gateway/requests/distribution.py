"""Tells whether a request samples from the policy's whole distribution, so that its samples can be trained on
(C9).

A behaviour logprob is comparable with the trainer's only if every token could have been sampled, at a known
temperature. Settings that cut or bend the distribution make a sample unscorable, with the setting as reason.
Settings that only end an answer (stop strings, stop tokens, a length, detected repetition) or only change its
text leave the distribution unchanged. A grammar that the trainer can repeat (shared/grammar.py) cuts it in a
known way. Neighbours: request_fields.py has the table of the fields' effects; samples.py asks once per
request. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from runtime.gateway.requests.request_fields import SAMPLING, sampled_temperature
from runtime.shared.grammar import repeatable

_DEFAULT_TEMPERATURE = 1.0
# By which the engine holds an answer to a grammar.
_GRAMMARS = ("structured_outputs", "response_format")


def temperature(settings: Mapping[str, Any]) -> float:
    """The temperature a request samples at."""
    given = settings.get("temperature")
    return _DEFAULT_TEMPERATURE if given is None else sampled_temperature(float(given))


def never() -> bool:
    """No grammar is repeated."""
    return False


def distorted_by(settings: Mapping[str, Any], *, repeats_grammars: Callable[[], bool] = never) -> str | None:
    """The first setting that bends the distribution, or None. `greedy` stands for a temperature of 0.

    `repeats_grammars`: whether the trainer can hold this model's answers to a grammar as the engine does;
    asked only where a request has one.
    """
    if temperature(settings) <= 0:
        return "greedy"
    if repeatable(settings) and repeats_grammars():
        settings = {name: value for name, value in settings.items() if name not in _GRAMMARS}
    return next((name for name in SAMPLING if _distorts(name, settings)), None) or _distorted_by_tools(
        settings
    )


def grammar(settings: Mapping[str, Any]) -> str | None:
    """The first setting by which the engine holds the answer to a grammar, or None."""
    return next((name for name in _GRAMMARS if _distorts(name, settings)), None) or _distorted_by_tools(
        settings
    )


def _distorts(name: str, settings: Mapping[str, Any]) -> bool:
    """A field that is null is an absent one; a field that the gateway refuses counts as distorting, should it
    ever come this far."""
    value, rule = settings.get(name), SAMPLING[name]
    if value is None:
        return False
    if rule.keeps_distribution is None:
        return rule.action == "refuse" and value not in rule.neutral
    return not rule.keeps_distribution(value)


def _distorted_by_tools(settings: Mapping[str, Any]) -> str | None:
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
