"""What stands in the fields that other dialects have of their own, and the rest of a request with such a one.

Neighbours: hostile.py draws from it, as from hostile_values.py, which has the fields of chat and completions.
"""

from __future__ import annotations

from typing import Any

from tests.runtime.hostile_values import BEYOND, OBJECT, TOKENS, nested, user


def _message(content: Any, role: str = "user") -> list[dict[str, Any]]:
    return [{"role": role, "content": content}]


# The fields that other dialects have of their own.
_FUNCTION = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}
_TOOL = {"name": "add", "input_schema": {"type": "object", "properties": {}}}
_USE = {"type": "tool_use", "id": "c", "name": "n", "input": {}}
DIALECTS: dict[str, dict[str, list[Any]]] = {
    "/v1/responses": {
        "input": [
            "a", _message("a"), _message([{"type": "input_text", "text": "a"}]), _message("a", "developer"),
            [*_message("a"), *_message([{"type": "output_text", "text": "b"}], "assistant"), *_message("c")],
            [*_message("a"), {"type": "function_call", "call_id": "c", "name": "n", "arguments": "{}"},
             {"type": "function_call_output", "call_id": "c", "output": "3"}],
            [*_message("a"), {"type": "function_call", "call_id": "c", "name": "n", "arguments": "{"}],
            [*_message("a"), {"type": "reasoning", "summary": [], "content": None}],
            [{"type": "item_reference", "id": "x"}], [{"type": nested(40)}], _message(nested(40)),
        ],
        "instructions": ["Be.", "", "\ud800", "a" * BEYOND],
        "previous_response_id": ["resp_x", "", "../..", "resp_" + "9" * 400],
        "tools": [[_FUNCTION], [_FUNCTION | {"strict": True}], [{"type": "web_search"}], [_FUNCTION] * 3],
        "tool_choice": ["auto", "none", "required", {"type": "function", "name": "add"}],
        "text": [{"format": {"type": "text"}}, {"format": {"type": "json_object"}}, {"verbosity": "low"},
                 {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}}],
        "reasoning": [{"effort": "low"}, {"effort": 3}, {"summary": "auto"}],
        "include": [["message.output_text.logprobs"], ["reasoning.encrypted_content"]],
        "top_logprobs": [0, 3, 10**20],
        "max_output_tokens": [1, 0, -1, 10**9],
        "metadata": [{"a": "b"}, {"a": 10**30}],
        "max_tool_calls": [1, 10**30],
        "truncation": ["auto", "disabled"],
        "store": [False],
        "stream": [True, False],
        "background": [True, False],
        "conversation": ["conv_1"],
        "prompt": [{"id": "p"}],
    },
    "/v1/messages": {
        "messages": [
            _message("a"), _message([{"type": "text", "text": "a"}]), _message("a", "system"),
            [*_message("a"), *_message([_USE], "assistant"),
             *_message([{"type": "tool_result", "tool_use_id": "c", "content": "3"}])],
            [*_message("a"), *_message([{"type": "thinking", "thinking": "x", "signature": ""}], "assistant"),
             *_message("b")],
            _message([{"type": "image", "source": {"type": "url", "url": "http://x"}}]), _message(nested(40)),
        ],
        "system": ["Be.", [{"type": "text", "text": "Be.", "cache_control": {"type": "ephemeral"}}]],
        "max_tokens": [1, 0, -1, 10**9],
        "stop_sequences": [["]]"], [""], ["a"] * 100],
        "tools": [[_TOOL], [_TOOL | {"type": "custom"}], [{"type": "bash_20250124", "name": "bash"}]],
        "tool_choice": [{"type": "auto"}, {"type": "any"}, {"type": "none"}, {"type": "tool", "name": "add"},
                        {"type": "auto", "disable_parallel_tool_use": True}],
        "thinking": [{"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}, {"type": "adaptive"}],
        "output_config": [{"effort": "low"}, {"format": {"type": "json_schema", "schema": OBJECT}}],
        "metadata": [{"user_id": "x"}],
        "stream": [True, False],
        "mcp_servers": [[{"url": "x"}]],
    },
    "/inference/v1/generate": {
        "token_ids": [[5], [], [-1], [BEYOND], [2**31], [2**63], [5.0], [True], [[5]], [5] * 3000, "abc"],
        "sampling_params": [
            {}, {"max_tokens": None}, {"max_tokens": 10**9}, {"max_tokens": TOKENS, "n": 3, "logprobs": 1},
            {"max_tokens": TOKENS, "logprobs": -1}, {"max_tokens": TOKENS, "prompt_logprobs": 3},
            {"output_kind": 2, "max_tokens": 1}, {"extra_args": {"a": nested(40)}}, {"model": "base"},
            {"flat_logprobs": True, "max_tokens": 1}, {"detokenize": False, "stop": ["a"], "max_tokens": 3},
        ],
        "output_mode": ["tokens", "text", "html"],
        "return_token_ids": [True],
        "stream": [True, False],
        "stream_options": [{"include_usage": True}],
        "features": [{"mm_hashes": {"image": ["a"]}, "mm_placeholders": {}}],
        "content_parts": [[{"type": "image_url", "url": "http://x"}]],
        "reasoning_parser_kwargs": [{"chat_template_kwargs": nested(40)}],
        "kv_transfer_params": [{}, {"a": 1}],
        "request_id": ["x"],
        "priority": [3],
    },
    "/tokenize": {
        "prompt": ["a", "", "\ud800", "a" * 200_000, ["a"]],
        "messages": [_message("a"), [], _message([{"type": "image_url"}]), _message(nested(40))],
        "add_special_tokens": [True],
        "return_token_strs": [True],
        "chat_template": ["{{ 1/0 }}"],
    },
    "/detokenize": {
        "tokens": [[5], [], [-1], [BEYOND], [2**31 - 1], [2**31], [2**63], ["a"], [5.5], [5] * 20_000],
    },
}  # fmt: skip
# The rest of a request with one of these fields.
USUAL: dict[str, dict[str, Any]] = {
    "/v1/responses": {"model": "policy", "max_output_tokens": TOKENS, "input": "a black cat"},
    "/v1/messages": {"model": "policy", "max_tokens": TOKENS, "messages": user("a black cat")},
    "/inference/v1/generate": {
        "model": "policy", "token_ids": [5, 6, 7], "sampling_params": {"max_tokens": TOKENS},
    },
    "/tokenize": {},
    "/detokenize": {},
}  # fmt: skip
