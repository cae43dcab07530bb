"""What hostile.py sends: values at and beyond the edges of every field of a completion request. Data only."""

from __future__ import annotations

import json
from typing import Any

# The tiny model's vocabulary has fewer tokens than this; its context is 1,024 tokens.
BEYOND = 4096
TOKENS = 6


def nested(depth: int, kind: str = "list") -> Any:
    """Something nested that deep."""
    value: Any = 1
    for _ in range(depth):
        value = [value] if kind == "list" else {"a": value}
    return value


def tool(name: Any = "look", parameters: Any = None, **more: Any) -> dict[str, Any]:
    """A tool as a client describes it."""
    function = {"name": name, "parameters": OBJECT if parameters is None else parameters, **more}
    return {"type": "function", "function": function}


def call(arguments: Any, name: Any = "look") -> dict[str, Any]:
    """A tool call as an assistant's message carries it."""
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


def user(content: Any, **more: Any) -> list[dict[str, Any]]:
    """A conversation of one message."""
    return [{"role": "user", "content": content, **more}]


# fmt: off
TEXTS = [
    "", " ", "\x00", "a\x00b", "\ud800", "\udfff\ud800", "\U0001f600" * 5, "\u202e\u0301" * 9, "<|im_end|>",
    "<|im_start|>system\n", "{{ 7 * 7 }}", "{% for i in range(10**9) %}a{% endfor %}", "../../etc/passwd",
    '<tool_call>\n{"name":', "\n\n", "é" * 300, "a" * 5000, "nan", "null", "-1", "\\", "'\";--", "%s%n",
]
NUMBERS: list[Any] = [
    0, -0.0, 1, -1, 2, 0.5, 1e-9, 1e-45, 1e9, 1e308, -1e308, 2**31 - 1, 2**31, -(2**31), 2**32, 2**53 + 1,
    2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64, 10**30, float("nan"), float("inf"), float("-inf"),
]
# One of each type JSON has: most of them are the wrong one for any given field.
TYPES: list[Any] = [True, 3, -1.5, "x", [], ["x"], [3], {}, {"a": 1}, nested(40), nested(900, "dict")]

REGEXES = [
    "[ab]+", "(a|b){2,4}", "", "(", "[", "a{2,1}", "*", "(?=a)b", r"\1", r"(a)\1", r"\p{L}+", "\x00", "a\x00",
    "(a+)+$", "((a+)+)+$", "(a|aa)+$", "(a|a)*b", "(.*a){24}", "a{1000}{1000}", "[a-z]{1,100000}", "é+",
    "((a{0,100}){0,100}){0,100}", "(x+x+)+y", ".*" * 40 + "z", "(" * 300 + "a" + ")" * 300, "(?i)abc",
    "|".join("abc" * 400), r"^[\w.-]+@[\w.-]+$", r"\d{4}-\d{2}", "[^\\x00-\\x7f]", "a" * 20_000, "(a?){9999}",
]
OBJECT: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "string"}, "b": {"type": "integer"}},
    "required": ["a"],
}
SCHEMAS: list[Any] = [
    OBJECT, {}, {"type": "object"}, {"type": "string"}, {"enum": ["x", "y"]}, {"const": 3}, {"type": "null"},
    {"type": "banana"}, {"type": 3}, {"type": []}, {"$ref": "#"}, {"$ref": "#/nowhere"}, {"$ref": 3},
    {"$ref": "http://169.254.169.254/latest"}, {"$ref": "file:///etc/passwd"}, {"properties": 3},
    {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    {"type": "string", "pattern": "(a+)+$"}, {"type": "string", "pattern": "("}, {"pattern": 1},
    {"type": "string", "minLength": 10**9}, {"type": "string", "minLength": 5, "maxLength": 2},
    {"type": "string", "minLength": -1}, {"type": "string", "format": "no-such-format"},
    {"type": "array", "minItems": 10**6}, {"type": "array", "items": {"type": "integer"}, "maxItems": 10**9},
    {"type": "array", "uniqueItems": True}, {"type": "array", "items": [{}, {}]},
    {"type": "array", "items": 3}, {"type": "integer", "minimum": -(10**30), "maximum": 10**30},
    {"type": "integer", "minimum": 5, "maximum": 1}, {"type": "number", "multipleOf": 0},
    {"type": "integer", "multipleOf": 3}, {"type": "number", "minimum": "a"}, {"anyOf": []}, {"not": {}},
    {"allOf": [{"type": "string"}, {"type": "integer"}]}, {"oneOf": [{"type": "string"}] * 50},
    {"enum": []}, {"enum": ["x" * 10] * 2000}, {"enum": [{"a": [1, {"b": None}]}]},
    {"patternProperties": {"^a+$": {"type": "string"}}}, {"additionalProperties": {"type": "string"}},
    {"type": "object", "properties": {f"k{index}": {"type": "string"} for index in range(400)}},
    {"type": "object", "required": ["missing"]}, {"type": "object", "propertyNames": {"pattern": "a"}},
    {"if": {"const": 1}, "then": False, "else": True}, {"type": ["string", "null", "array"]},
    nested(30, "dict"), nested(70, "dict"), nested(400, "dict"), {"items": nested(200)}, True, False, [],
    "x", 3, {"title": "\x00", "type": "string"}, {"type": "string", "maxLength": 10**6},
]
GRAMMARS = [
    'root ::= "a" | "b"', "", "   ", "root ::= (", 'root ::= root "a"', "root ::= root", "root ::= other",
    'root ::= "a" root | "a"', 'x ::= "a"', "root ::= [a-z]{1,100000}", 'root ::= ("a"?){500}', "\x00",
    'start: "a" | "b"', "start: /(a+)+$/", "start: start start", "%ignore /x/", 'root ::= ""',
    "root ::= " + "(" * 500 + '"a"' + ")" * 500, "root ::= " + " | ".join(f'"{n}"' for n in range(500)),
    "root ::= a\na ::= b\nb ::= a", 'root ::= ""\n' * 500, 'root ::= root root | "a"', 'root ::= (root)* "a"',
]
CHOICES: list[Any] = [
    ["red", "blue"], [], [""], ["", "a"], ["a"] * 300, [str(n) for n in range(2000)], [3], "red", ['"'],
    ["\x00"], ["\\"], ["a\nb"], [None], ["é" * 200], {"a": 1},
]
TAGS: list[Any] = [
    "", "{}", "x", "[]", 3, json.dumps({"structures": [], "triggers": []}),
    json.dumps({"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a"]}),
    json.dumps({"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<b"]}),
    json.dumps({"structures": 3, "triggers": 3}),
    json.dumps({"type": "structural_tag", "format": {"type": "any_text"}}),
    json.dumps({"type": "structural_tag", "format": {"type": "json_schema", "json_schema": OBJECT}}),
    json.dumps({"type": "structural_tag", "format": nested(90, "dict")}),
]
STRUCTURED: list[Any] = [
    *({"regex": regex} for regex in REGEXES),
    *({"json": schema} for schema in SCHEMAS),
    *({"json": json.dumps(schema)} for schema in SCHEMAS[::3]),
    *({"grammar": grammar} for grammar in GRAMMARS),
    *({"choice": choice} for choice in CHOICES),
    *({"structural_tag": tag} for tag in TAGS),
    {}, {"json_object": True}, {"json_object": False}, {"regex": "a", "choice": ["a"]}, {"regex": 3},
    {"json": "{"}, {"json": ""}, {"grammar": 3}, {"whitespace_pattern": "("}, {"unknown": 1}, {"json": None},
    {"regex": "a", "_backend": "outlines"}, {"regex": "a", "whitespace_pattern": "(a+)+$"},
    {"regex": "a", "disable_any_whitespace": "x"}, {"json": OBJECT, "disable_any_whitespace": True},
]
FORMATS: list[Any] = [
    *({"type": "json_schema", "json_schema": {"name": "a", "schema": schema}} for schema in SCHEMAS[::2]),
    {"type": "text"}, {"type": "json_object"}, {"type": "json_schema"}, {"type": "banana"}, {}, {"type": 3},
    {"type": "json_schema", "json_schema": {}}, {"type": "json_schema", "json_schema": "x"},
    {"type": "json_schema", "json_schema": {"name": 3, "schema": OBJECT}}, {"type": "structural_tag"},
    {"type": "json_schema", "json_schema": {"schema": OBJECT}}, {"type": "json_schema", "schema": OBJECT},
    {"type": "structural_tag", "structures": 3, "triggers": 3}, {"type": "structural_tag", "format": 3},
    {"type": "structural_tag", "format": {"type": "banana"}},
    {"type": "structural_tag", "format": {"type": "regex", "pattern": "(a+)+$"}},
    {"type": "structural_tag", "triggers": ["<a"],
     "structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}]},
]
TOOLS: list[Any] = [
    *([tool(parameters=schema)] for schema in SCHEMAS[::2]),
    *([tool(name=name)] for name in TEXTS),
    [], [tool()], [tool(), tool()], [tool(f"t{index}") for index in range(64)], [tool(strict=True)],
    [{"type": "function"}], [{"type": "function", "function": {}}], [{"type": "banana"}], [None], [[]],
    {"look": {}}, [{"type": "function", "function": "look"}], [{"function": {"name": "look"}}],
    [{"type": "function", "function": {"name": "look"}}], [tool(description="\x00" * 20)],
    [{"type": "function", "function": {"name": "look", "parameters": None}}], [tool(description=3)],
    [tool(strict="yes")], [tool(unknown={"a": [1]})], [tool(name=None)], [tool(name=3)],
    [{"name": "look", "parameters": {}}], [tool() | {"defer_loading": True}], [nested(200, "dict")],
]
TOOL_CHOICES: list[Any] = [
    "auto", "none", "required", "look", "", {"type": "function"}, {"function": "look"},
    {"type": "function", "function": {"name": "look"}}, {"type": "function", "function": {"name": "other"}},
    {"type": "function", "function": {"name": 3}}, {"type": "function", "function": {}},
    {"type": "function", "function": {"name": ""}}, {"type": "banana", "function": {"name": "look"}},
    {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
]
CALLS: list[Any] = [
    [call("{}")], [call("{")], [call("")], [call({})], [call(None)], [call("[]")], [call("3")], [call('"x"')],
    [call("{}", None)], [call("{}", 3)], [{}], [None], ["x"], [], 3, "x", {"a": 1}, [call("{}")] * 40, True,
    [{"id": None, "type": "function", "function": {"name": "look", "arguments": "{}"}}], [{"function": None}],
    [call("[" * 2000)], [call('{"a":' * 900 + "1" + "}" * 900)], [{"type": "function"}], [call("nan")],
    [call(nested(300))], [{"type": "custom", "id": "c", "custom": {"name": "x", "input": "y"}}],
]
MESSAGES: list[Any] = [
    *([{"role": "user", "content": text}] for text in TEXTS),
    *(
        [
            {"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "content": "b", "tool_call_id": "c1"},
        ]
        for calls in CALLS
    ),
    [None], [[]], [{}], {"role": "user", "content": "a"}, [{"role": "user"}], [{"content": "a"}],
    *([{"role": role, "content": "a"}] for role in (3, None, "", "banana", "developer", "x" * 500, {})),
    *(user(content) for content in (None, "", [], 3, {"a": 1}, ["a"], [None], [[]], nested(800), True)),
    user([{"type": "text"}]), user([{"type": "text", "text": None}]), user([{"type": "text", "text": 3}]),
    user([{"type": "text", "text": "a"}] * 200), user([{"text": "a"}]), user([{"type": None, "text": "a"}]),
    user([{"type": "refusal", "refusal": "a"}]), user("a") * 500, user("a" * 20000), user("a", name=3),
    user([{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]), user("a", tools=[tool()]),
    user("a", tools=3), user("a", unknown=nested(50)), user("a", tool_calls=[call("{}")]),
    [{"role": "tool", "content": "a"}], [{"role": "tool", "content": "a", "tool_call_id": 3}],
    [{"role": "tool", "content": None, "tool_call_id": "c1"}], [{"role": "assistant", "content": None}],
    [{"role": "function", "name": "look", "content": "a"}], [{"role": "assistant"}],
    *([{"role": "assistant", "content": "a", "reasoning_content": odd}] for odd in (3, "", None, [{}])),
    [{"role": "assistant", "content": "a", "reasoning": {"a": 1}}],
    [{"role": "assistant", "content": "a", "function_call": {"name": "look", "arguments": "{}"}}],
    [{"role": "assistant", "content": "a", "audio": {"id": "x"}}], [{"role": "system", "content": ["a"]}],
    [{"role": "system", "content": [{"type": "text", "text": "a"}]}, *user("a")],
]
PROMPTS: list[Any] = [
    *TEXTS, [[]], [""], [[], [3]], [BEYOND], [-1], [2**31], [2**63], [2**64], [10**30], [3.5], [True, False],
    [None], [3, "a"], ["a", 3], [[3], "a"], [[3], 4], [[[3]]], [[BEYOND], [3]], ["a"] * 300, [[3]] * 300,
    [5] * 1017, [5] * 1018, [5] * 1023, [5] * 1024, [5] * 5000, "a" * 20000, [[3, BEYOND]], [3, -1],
    ["a", ""],
    [[3], []], nested(300), {"prompt_embeds": "AAAA"}, [{"prompt_token_ids": [3]}], {"prompt_token_ids": [3]},
]

# What each field takes, as a client might send it.
TAKEN: dict[str, list[Any]] = {
    "temperature": [0, 0.7, 1, 1.0, 2],
    "n": [1, 2, 3],
    "max_tokens": [1, 4, TOKENS],
    "max_completion_tokens": [1, 4],
    "stop": [["a", "e"], "the", []],
    "stop_token_ids": [[5, 6], []],
    "include_stop_str_in_output": [True, False],
    "stream": [True, False],
    "stream_options": [{"include_usage": True}],
    "stream_interval": [1, 4],
    "top_p": [0.3, 1],
    "top_k": [1, 5, 0, -1],
    "min_p": [0, 0.2, 1],
    "presence_penalty": [2.0, 0],
    "frequency_penalty": [-2.0],
    "repetition_penalty": [1.7, 1],
    "repetition_detection": [{"max_pattern_size": 3, "min_pattern_size": 1, "min_count": 2}],
    "logit_bias": [{"5": 100, "6": -100}],
    "allowed_token_ids": [[5, 6]],
    "bad_words": [["the", "é" * 50]],
    "min_tokens": [0, 4],
    "ignore_eos": [True],
    "logprobs": [True, False, 2, 0],
    "top_logprobs": [0, 3],
    "prompt_logprobs": [0, 5],
    "logprob_token_ids": [[5, 6]],
    "return_token_ids": [True],
    "return_tokens_as_token_ids": [True],
    "skip_special_tokens": [False],
    "spaces_between_special_tokens": [False],
    "add_special_tokens": [True],
    "truncate_prompt_tokens": [300, 3, -1],
    "truncation_side": ["left", "right"],
    "cache_salt": ["x"],
    "add_generation_prompt": [False, True],
    "continue_final_message": [False],
    "chat_template_kwargs": [{"enable_thinking": False}],
    "documents": [[{"title": "a", "text": "b"}]],
    "reasoning_effort": ["low"],
    "include_reasoning": [False],
    "return_prompt_text": [True],
    "parallel_tool_calls": [False],
    "response_format": [{"type": "text"}, {"type": "json_object"}],
    "structured_outputs": [{"regex": "[ab]+"}, {"choice": ["red", "blue"]}],
    "tools": [[tool()]],
    "seed": [0, 7],
    "user": ["u"],
    "metadata": [{"a": "b"}],
    "store": [True],
}
# Its edges, and what is just beyond them.
EDGES: dict[str, list[Any]] = {
    "temperature": [0.01, 0.009, 2.1, -0.1, 1e-45],
    "n": [0, -1, 129, 2**31, 1.5, "2", 16],
    "max_tokens": [0, -1, 1000, 1024, 10**6, 2**31, 2**63, 10**30, 1.5, "5"],
    "max_completion_tokens": [0, -1, 10**6, 2**63],
    "stop": [[""], "", ["a"] * 2000, ["x" * 5000], [None], ["\x00"], ["\ufffd"], [""] * 3],
    "stop_token_ids": [[-1], [BEYOND], [2**31], [2**63], [2**64], [True], ["5"], [5] * 5000, [1.5], 5],
    "stream_options": [{"include_usage": "x"}, {"continuous_usage_stats": True}, {"unknown": 1}],
    "stream_interval": [0, -1, 2**31, 2**63 - 1],
    "top_p": [0, -0.1, 1.1, 1e-12],
    "top_k": [-2, 2**31, 2**63 - 1, BEYOND],
    "min_p": [-0.1, 1.1],
    "presence_penalty": [2.1, -2.1, 1e308],
    "frequency_penalty": [2.1, 1e308],
    "repetition_penalty": [0, -1, 1e-30, 1e-45, 1e30, 1e308],
    "repetition_detection": [
        {"max_pattern_size": -1}, {"max_pattern_size": 2**31, "min_count": 2}, {"max_pattern_size": 2**63},
        {"max_pattern_size": 3, "min_pattern_size": 9, "min_count": 2},
        {"max_pattern_size": 3, "min_count": 1}, {"max_pattern_size": 1, "min_count": 2**62},
    ],
    "logit_bias": [
        {"x": 1}, {"-1": 1}, {str(BEYOND): 1}, {"5": 1e308}, {"5": "x"}, {"5": None}, {"5.5": 1}, {"5": 101},
        {"5": -101}, {str(2**31): 1}, {str(2**63): 1}, {"": 1}, {" 5": 1}, {"٥": 1}, {"1_0": 1}, [[5, 1]],
        {str(token): -100 for token in range(800)}, {str(token): 100 for token in range(800)},
    ],
    "allowed_token_ids": [
        [-1], [BEYOND], [2**31], [2**63], [5] * 9000, [True], ["5"], [None], 5, {"5": 1}, [5.5], [0],
    ],
    "bad_words": [[""], [" "], ["\x00"], ["a"] * 3000, ["é" * 3000], "the", [["a", "b"]], ["\ufffd"]],
    "min_tokens": [-1, 50, 1023, 10**6, 2**31, 2**63],
    "logprobs": [-1, -2, 21, BEYOND, 10**6, 2**31, "true", 1.5],
    "top_logprobs": [-1, -2, 21, BEYOND, 2**31, 1.5],
    "prompt_logprobs": [-1, -2, 21, BEYOND, 2**31, 1.5],
    "logprob_token_ids": [[-1], [BEYOND], list(range(200)), [2**31], [2**63], ["5"], [True], 5],
    "truncate_prompt_tokens": [0, -2, 1024, 10**6, 2**31, 2**63 - 1, 1.5],
    "truncation_side": ["middle", ""],
    "cache_salt": ["", "x" * 2000, "\x00"],
    "continue_final_message": [True],
    "chat_template_kwargs": [
        {"messages": []}, {"tools": 3}, {"add_generation_prompt": "x"}, {"tokenize": True},
        {"chat_template": "x"}, {"chat_template": "{{ 1/0 }}"}, {"conversation": []}, {"return_dict": True},
        {"return_tensors": "pt"}, {"bos_token": {}}, {"padding": True}, {"max_length": 1},
        {"truncation": True},
        {"raise_exception": 1}, {"": 1}, {"a": nested(60)}, {"documents": 3}, {"self": 1}, {"kwargs": 1},
        {"continue_final_message": True}, {"tokenizer": 1}, {"tokenizer_kwargs": {"padding": "x"}},
        {"model_config": 1}, {"return_assistant_tokens_mask": True}, {"enable_thinking": nested(20)},
        {"range": 1, "namespace": 2}, {"loop": 1}, {"strftime_now": 1}, {"tool_choice": 1},
    ],
    "documents": [[{}], [{"a": 1}], 3, [{"title": "\x00"}], [{"text": "a" * 9000}]],
    "reasoning_effort": ["", "max", "banana"],
    "response_format": FORMATS,
    "structured_outputs": STRUCTURED,
    "tools": TOOLS,
    "tool_choice": TOOL_CHOICES,
    "messages": MESSAGES,
    "prompt": PROMPTS,
    "guided_regex": ["(a+)+$"],
    "prompt_embeds": ["AAAA", "gAJ9cQAu"],
    "kv_transfer_params": [{"do_remote_decode": True}, {"prompt_token_ids": [3]}],
    "vllm_xargs": [{"a": 10**30}, {"kv_transfer_params": "x"}],
    "routed_experts_prompt_start": [0, 5, -1, 10**12],
    "priority": [0, -1, 2**62, 2**64],
    "seed": [-1, 2**63, 2**64, 1.5],
    "chat_template": ["{{ 1/0 }}", "{% for i in range(10**9) %}a{% endfor %}"],
    "logits_processors": [["os.system"]],
    "suffix": [""],
    "best_of": [1, 2],
}
# What only means something, or only goes wrong, together.
TOGETHER: list[dict[str, Any]] = [
    {"tools": [tool()], "tool_choice": "required"},
    {"tools": [tool()], "tool_choice": "auto", "stream": True},
    {"tools": [tool()], "tool_choice": "required", "stream": True},
    {"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "look"}}},
    {"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "look"}}, "stream": True},
    *({"tools": [tool(parameters=schema)], "tool_choice": "required"} for schema in SCHEMAS),
    {"tools": [tool()], "tool_choice": "required", "response_format": {"type": "json_object"}},
    {"tools": [tool()], "tool_choice": "required", "structured_outputs": {"regex": "a"}},
    {"tools": "x", "tool_choice": {"type": "function", "function": {"name": "look"}}},
    {"tools": [3], "tool_choice": {"type": "function", "function": {"name": "look"}}},
    {"tools": [{"function": 3}], "tool_choice": {"type": "function", "function": {"name": "look"}}},
    {"tools": [tool()], "tool_choice": "required", "max_tokens": 1, "n": 3},
    {"structured_outputs": {"regex": "a"}, "min_tokens": 5}, {"structured_outputs": {"regex": "a"}, "n": 4},
    {"structured_outputs": {"regex": "[ab]+"}, "logit_bias": {str(t): -100 for t in range(800)}},
    {"structured_outputs": {"regex": "a"}, "bad_words": ["a"]},
    {"structured_outputs": {"regex": "a"}, "stop": "a"},
    {"structured_outputs": {"regex": "a"}, "ignore_eos": True},
    {"structured_outputs": {"json": OBJECT}, "top_k": 1},
    {"structured_outputs": {"choice": ["a"]}, "stop_token_ids": [5]},
    {"response_format": FORMATS[0], "stream": True},
    {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
    {"structured_outputs": {"regex": "a"}, "repetition_penalty": 1e30, "temperature": 2},
    {"structured_outputs": {"regex": "[ab]*"}, "max_tokens": 1000, "temperature": 0},
    {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}, "n": 3},
    {"stream": True, "stream_options": {}}, {"stream": True, "prompt_logprobs": 0}, {"stream": True, "n": 16},
    {"stream": True, "prompt_logprobs": 5}, {"stream": False, "stream_options": {"include_usage": True}},
    {"stream": True, "logprobs": 3}, {"stream": True, "logprobs": True, "top_logprobs": 20},
    {"stream": True, "stop": ["a", "e", "i", "o", "u", " "]}, {"stream": True, "max_tokens": 0},
    {"stream": True, "return_token_ids": True, "return_prompt_text": True, "stream_interval": 5},
    {"logprobs": True, "top_logprobs": 20, "n": 3}, {"logprobs": 20, "n": 3, "return_token_ids": True},
    {"logprobs": 2, "logprob_token_ids": [5, 6]}, {"logprobs": True, "logprob_token_ids": [5, BEYOND]},
    {"min_tokens": 6, "max_tokens": 3}, {"min_tokens": 6, "stop_token_ids": list(range(300))},
    {"min_tokens": 6, "stop": ["a"] * 20, "ignore_eos": True}, {"allowed_token_ids": [0], "min_tokens": 3},
    {"allowed_token_ids": [5], "logit_bias": {"5": -100}}, {"allowed_token_ids": [5], "bad_words": ["a"]},
    {"temperature": 0, "n": 3}, {"temperature": 0, "top_k": 2**31, "top_p": 1e-9, "min_p": 1},
    {"temperature": 2, "repetition_penalty": 1e-30}, {"temperature": 0.01, "logit_bias": {"5": 100}},
    {"temperature": 2, "presence_penalty": -2, "frequency_penalty": -2, "repetition_penalty": 1e38},
    {"truncate_prompt_tokens": 1, "prompt_logprobs": 1},
    {"truncate_prompt_tokens": 2, "truncation_side": "left"},
    {"echo": True, "max_tokens": 0}, {"echo": True, "max_tokens": 0, "logprobs": 1, "stream": True},
    {"echo": True, "logprobs": 1, "n": 3}, {"echo": True, "logprobs": 0, "temperature": 0, "n": 2},
    {"echo": True, "stream": True, "logprobs": 2, "n": 2}, {"echo": True, "prompt_logprobs": 2},
    {"echo": True, "truncate_prompt_tokens": 2}, {"echo": True, "logprob_token_ids": [5], "logprobs": 1},
    {"n": 64, "max_tokens": 2}, {"max_tokens": None},
    {"n": None, "stop": None},
    {"continue_final_message": True, "add_generation_prompt": False}, {"documents": [{"text": "a"}] * 300},
    {"continue_final_message": True, "add_generation_prompt": True},
    {"cache_salt": "x", "prompt_logprobs": 1},
    {"continue_final_message": True, "add_generation_prompt": False, "messages": [{"role": "assistant",
    "content": ""}]},
    {"continue_final_message": True, "add_generation_prompt": False, "messages": user([])},
    {"max_tokens": 3, "max_completion_tokens": 5}, {"max_tokens": 5000, "max_completion_tokens": None},
    {"return_tokens_as_token_ids": True, "logprobs": True},
    {"return_tokens_as_token_ids": True, "logprobs": 5},
    {"add_special_tokens": True, "truncate_prompt_tokens": 5},
    {"skip_special_tokens": False, "ignore_eos": True},
]
MODELS = ["policy", "policy", "policy", "base", "policy@v0", "policy@v1", "openai/policy", "arbor:policy@v1"]
ODD_MODELS: list[Any] = [
    "gpt-4o", "", "policy@v", "policy@v-1", "policy@v9", "policy@v" + "9" * 5000, "policy@v٣", "\x00",
    "a" * 5000,
    None, 3, [], {"a": 1}, True, "../policy", "openai/openai/policy", "policy ", "POLICY", "policy@v01",
]

# ------------------------------------------------------------------ bytes

_CHAT = b'{"model":"policy","max_tokens":4,"messages":[{"role":"user","content":"a"}]'
_TEXT = b'{"model":"policy","max_tokens":4,"prompt":"a"'
RAW: list[bytes] = [
    b"", b"{", b"[]", b"null", b"3", b'"x"', b"\xff\xfe", b"\x00" * 50, b"{}{}", _CHAT, _CHAT + b"}x",
    _CHAT + b",}", b"\xef\xbb\xbf" + _CHAT + b"}", (_CHAT + b"}").decode().encode("utf-16"), b"<xml/>",
    b"a=b&c=d", b"{'a': 1}", _CHAT + b',"n":1,"n":2}', _CHAT + b',"model":"base"}',
    _CHAT + b',"stream":true,"stream":false}', _CHAT + b',"temperature":NaN}', _CHAT + b',"top_p":Infinity}',
    _CHAT + b',"temperature":-Infinity}', _CHAT + b',"temperature":1e400}', _CHAT + b',"temperature":1e-400}',
    _CHAT + b',"top_k":' + b"9" * 5000 + b"}", _CHAT + b',"max_tokens":1e999}', _CHAT + b',"top_k":0x10}',
    _CHAT + b',"top_k":01}', _CHAT + b',"top_k":1.}', _CHAT + b',"user":"\\ud800"}',
    _CHAT + b',"user":"\xed\xa0\x80"}', _CHAT + b',"user":"\\u0000"}', _CHAT + b',"user":"a\nb"}',
    _CHAT + b',"stop":["\\ud800"]}', _CHAT + b',"stop":["\xff"]}', b"[" * 1_000_000, b'{"a":' * 200_000,
    _CHAT + b',"metadata":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    *(
        _CHAT + b',"chat_template_kwargs":' + b'{"a":' * depth + b"1" + b"}" * depth + b"}"
        for depth in (60, 100, 300, 700, 900, 5000)
    ),
    _CHAT + b',"tools":' + b"[" * 950 + b"]" * 950 + b"}",
    _TEXT + b',"prompt":' + b"[" * 700 + b"]" * 700 + b"}", _CHAT + b',"user":"' + b"a" * 3_000_000 + b'"}',
    _TEXT + b',"prompt":"' + b"a" * 1_000_000 + b'"}', _TEXT + b',"prompt":[' + b"5," * 200_000 + b"5]}",
    _CHAT + b"," + b",".join(b'"k%d":1' % index for index in range(3000)) + b"}", _TEXT + b',"prompt":""}',
    _TEXT + b',"logit_bias":{' + b",".join(b'"%d":1' % index for index in range(20_000)) + b"}}",
]
HEADERS: list[dict[str, str]] = [
    {"x-slipway-rollout": "r" * 129}, {"x-slipway-rollout": "../../etc"}, {"x-slipway-rollout": ""},
    {"x-slipway-call": "-1"}, {"x-slipway-call": "9" * 30}, {"x-slipway-call": "1", "x-slipway-rollout": "r"},
    {"x-slipway-purpose": "banana"}, {"x-slipway-purpose": "eval"}, {"x-slipway-request": "x" * 500},
    {"x-slipway-request": "same"}, {"x-slipway-predictor": "a b"}, {"content-type": "text/plain"},
    {"content-encoding": "gzip"}, {"accept": "text/html"}, {"expect": "banana"},
    {"x-" + "a" * 200: "b" * 2000},
]
PREFIXES = [
    "/rollouts/r1", "/rollouts/%2e%2e", "/rollouts/..%2f..", "/rollouts/" + "r" * 300, "/rollouts/%00",
    "/rollouts/%ff", "/rollouts/a%20b", "/rollouts/", "/rollouts/r/v1/rollouts/q", "/rollouts/%0d%0aX:%20y",
]

# ------------------------------------------------------------------ the training routes

NAMES = [
    "step-000001", "step-000009", "..", "../..", "..%2F..%2Fetc%2Fpasswd", "%2e%2e", "%2Fetc%2Fpasswd", "%00",
    "", "step-000001%2F..", ".tmp-step-000001-1", "pinned.json", "a" * 5000, "%ff%fe", "step-%0a", "*", "~",
    "$(id)", "....//", "step-000001/adapter/adapter_model.safetensors", "%5C..%5C..", "C:%5C", "%ED%A0%80",
    "٣",
]
# Path and query parameters that should be numbers; those that are, are small: they may be seconds.
DIGITS = ["0", "1", "-1", "0.01", "1.5", "x", "", "%31", "٣", "nan", "1_0", "+1", "1e-3", "9" * 5000,
"true", "[]"]
STATES: list[Any] = [
    {"a": "x" * 70_000}, {"a": nested(60)}, {"a": nested(90)}, {"a": nested(500)}, {"a": 10**400},
    {"a": "\ud800"},
    {"\ud800": 1}, {"a": float("nan")}, {"a": float("-inf")}, {"": {}}, {"a": 2**64},
    {"a": nested(900, "dict")},
]
