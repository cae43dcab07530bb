"""Chooses vLLM's parsers for a model's tool calls and thoughts, by its chat template and tokens.

Neighbours: command.py reads the files and passes the names on; the gateway's answers.py hands the thought
through. Pure: knows nothing of files, engines or vLLM, except the names of its parsers (0.32).

A thought is separated from the answer if the template has thoughts: programs read `content`, and a thought in
front of the answer may contain the very text they look for. An answer without the end of a thought is wholly
a thought to vLLM, even if the model never thinks (Qwen3's base models have its template): answers.py gives
the client such an answer as content. For a request with a schema vLLM applies it to the text after the
thought.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


class Parsers(NamedTuple):
    """vLLM's names of them; None if it has none for this model."""

    tool_calls: str | None
    reasoning: str | None


@dataclass(frozen=True)
class ParserRule:
    """A parser, the text that a template must contain for it, and the tokens without which vLLM ends at its
    start."""

    parser: str
    marks: tuple[str, ...]
    tokens: tuple[str, ...] = ()
    without: str | None = None

    def matches(self, template: str, has_token: Callable[[str], bool]) -> bool:
        has_marks = all(mark in template for mark in self.marks) and (self.without or "\0") not in template
        return has_marks and all(has_token(token) for token in self.tokens)


_DEEPSEEK_TOKENS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_LFM_TOKENS = ("<|tool_call_start|>", "<|tool_call_end|>")
_THOUGHT = ("<think>", "</think>")
# The first that fits. Of the chat formats whose calls look alike the narrower one comes first.
TOOL_CALLS = (
    ParserRule("openai", ("<|channel|>", "<|call|>")),  # harmony: gpt-oss
    ParserRule("mistral", ("[TOOL_CALLS]",), ("[TOOL_CALLS]",)),
    ParserRule("deepseek_v3", (_DEEPSEEK_TOKENS[0], "```json"), _DEEPSEEK_TOKENS),
    ParserRule("deepseek_v31", (_DEEPSEEK_TOKENS[0],), _DEEPSEEK_TOKENS, without="```json"),
    ParserRule("lfm2", _LFM_TOKENS[:1], _LFM_TOKENS),
    ParserRule("olmo3", ("<function_calls>",)),
    ParserRule("phi4_mini_json", ("<|tool|>", "<|/tool|>")),
    ParserRule("granite4", ("<|start_of_role|>", "</tool_call>")),
    ParserRule("granite", ("<|start_of_role|>", "<|tool_call|>")),
    ParserRule("qwen3_coder", ("<tool_call>", "<function=", "<parameter=")),
    ParserRule("glm45", ("<tool_call>", "<arg_key>")),
    # Llama 3.1 and later: Llama 3, of the same form, has neither the token nor tools.
    ParserRule("llama3_json", ("<|start_header_id|>", "tool_call"), ("<|python_tag|>",)),
    ParserRule("hermes", ("<tool_call>",)),  # Qwen2.5, Qwen3, SmolLM3, Hermes
    # Of this form, with no word of tools: a call that a request forces is still read.
    ParserRule("hermes", ("<|im_start|>",)),
)
REASONING = (
    ParserRule("openai_gptoss", ("<|channel|>", "<|call|>")),
    ParserRule("mistral", ("[THINK]",), ("[THINK]", "[/THINK]", "[TOOL_CALLS]")),
    ParserRule("granite", ("Here is my thought process:",)),
    # Its thoughts are marked by words, not by tokens of their own: the parser needs the tokens of these
    # words.
    ParserRule("olmo3", ("<think>", "<function_calls>"), ("Ġ</", "</", "think", ">")),
    ParserRule("glm45", (*_THOUGHT, "<arg_key>"), _THOUGHT),
    # The switch that this parser, too, goes by: without a thought the whole answer is content.
    ParserRule("qwen3", (*_THOUGHT, "enable_thinking"), _THOUGHT),
    ParserRule("deepseek_r1", _THOUGHT, _THOUGHT),
)


def select_parsers(template: str, has_token: Callable[[str], bool]) -> Parsers:
    """The parsers of a model with this chat template. `has_token`: whether a text is one of its tokens."""

    def first(rules: tuple[ParserRule, ...]) -> str | None:
        return next((rule.parser for rule in rules if rule.matches(template, has_token)), None)

    return Parsers(first(TOOL_CALLS), first(REASONING))
