"""The table of request fields (runtime/gateway/requests/request_fields.py): pure."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.engine.last_turn_parsing import LAST_TURN
from runtime.gateway.requests import distribution
from runtime.gateway.requests.grammar_size import check_grammar_size
from runtime.gateway.requests.request_fields import CHAT, COMPLETION, BadField, check, ignored_fields
from tests.runtime.hostile_values import call, nested

CHAT_BODY: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "x"}]}


def test_a_seed_never_reaches_the_cpu_engine_but_reaches_cuda() -> None:
    body = CHAT_BODY | {"seed": 7}
    assert check("chat", body, "cpu") == CHAT_BODY
    assert check("chat", body, "cuda") == body


def test_a_seed_that_is_not_heeded_is_named() -> None:
    body = CHAT_BODY | {"seed": 7, "user": "u"}
    assert ignored_fields("chat", body, "cpu") == ("seed",)
    assert (
        ignored_fields("chat", CHAT_BODY | {"seed": None}, "cpu")
        == ignored_fields("chat", body, "cuda")
        == ()
    )


def test_nothing_is_changed_in_what_passes() -> None:
    body = CHAT_BODY | {"temperature": 0.7, "n": 4, "tools": [], "stop": ["\n"], "top_p": 1.0}
    assert check("chat", body, "cpu") == body


def test_the_given_body_is_left_as_it_is() -> None:
    body = CHAT_BODY | {"seed": 7}
    check("chat", body, "cpu")
    assert body["seed"] == 7


def test_a_null_field_is_an_absent_one() -> None:
    assert check("chat", CHAT_BODY | {"guided_json": None, "top_p": None}, "cpu") == CHAT_BODY


@pytest.mark.parametrize(
    "name", sorted({"kv_transfer_params", "prompt_embeds", "vllm_xargs", "guided_regex"})
)
def test_what_is_refused_says_why(name: str) -> None:
    with pytest.raises(BadField, match="is not served: ") as caught:
        check("completion", {"model": "policy", "prompt": "x", name: {"a": 1}}, "cpu")
    assert caught.value.param == name


def test_a_refused_field_that_asks_for_nothing_is_dropped() -> None:
    neutral = {"use_beam_search": False, "length_penalty": 1.0, "echo": False, "best_of": 1}
    assert check("chat", CHAT_BODY | neutral, "cpu") == CHAT_BODY


def test_an_unknown_field_is_refused_by_name() -> None:
    with pytest.raises(BadField, match="'temprature'"):
        check("chat", CHAT_BODY | {"temprature": 1}, "cpu")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("top_k", 10**30),
        ("logit_bias", {"5": float("inf")}),
        ("n", 0),
        ("n", 129),
        ("n", 2.5),
    ],
)
def test_numbers_that_end_in_a_500_or_are_changed_unsaid_are_refused(field: str, value: Any) -> None:
    with pytest.raises(BadField) as caught:
        check("chat", CHAT_BODY | {field: value}, "cpu")
    assert caught.value.param == field


@pytest.mark.parametrize("tiny", [0.001, 0.0099, 1e-45])
def test_r08_a_tiny_temperature_is_sent_as_the_engines_smallest(tiny: float) -> None:
    asked = CHAT_BODY | {"temperature": tiny}
    assert check("chat", asked, "cpu") == CHAT_BODY | {"temperature": 0.01}
    assert asked["temperature"] == tiny, "the request itself is changed"
    assert distribution.temperature(asked) == 0.01, "another is recorded than was sampled with"
    assert check("chat", CHAT_BODY | {"temperature": 0}, "cpu")["temperature"] == 0


def test_a_grammar_and_a_list_of_allowed_tokens_do_not_go_together() -> None:
    both = {"structured_outputs": {"regex": "[ab]+"}, "allowed_token_ids": [5]}
    with pytest.raises(BadField, match="does not go with"):
        check("chat", CHAT_BODY | both, "cpu")


def test_every_drop_and_refusal_has_a_reason() -> None:
    for rules in (CHAT, COMPLETION):
        assert all(rule.reason for rule in rules.values() if rule.action != "pass")


@pytest.mark.parametrize("value", [[], [3], True, 3, -1.5, "x"])
def test_a_grammar_that_is_no_object_is_refused_before_vllm_fails_at_it(value: Any) -> None:
    with pytest.raises(BadField, match="is an object"):
        check("completion", {"model": "policy", "prompt": "a", "structured_outputs": value}, "cpu")


@pytest.mark.parametrize("field", ["chat_template_kwargs", "tools", "messages", "response_format"])
def test_what_is_nested_without_end_is_refused(field: str) -> None:
    with pytest.raises(BadField, match="64 deep") as caught:
        check("chat", CHAT_BODY | {field: nested(70, "dict")}, "cpu")
    assert caught.value.param == field
    assert check("chat", CHAT_BODY | {"tools": nested(60)}, "cpu")


@pytest.mark.parametrize("arguments", ["[" * 5000, '{"a":' * 100 + "1" + "}" * 100])
def test_an_earlier_calls_arguments_are_read_as_vllm_reads_them(arguments: str) -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [call(arguments)]}
    with pytest.raises(BadField, match="64 deep"):
        check("chat", CHAT_BODY | {"messages": [called]}, "cpu")
    fine = called | {"tool_calls": [call('{"a": [1]}'), call("{"), {}, 3]}
    assert check("chat", CHAT_BODY | {"messages": [fine, "x", {"tool_calls": 3}]}, "cpu")


@pytest.mark.parametrize("name", ["kv_transfer_params", LAST_TURN, "prompt_token_ids"])
def test_joined_by_the_gateway_alone_no_field_gives_the_engine_ids(name: str) -> None:
    """Turns go on from ids that the gateway recorded (prefix_continuation.py), never from a client's."""
    values: list[Any] = [{"prompt_token_ids": [5, 6]}, {}, [5, 6], 3]
    for value in values:
        for kind, body in (("chat", CHAT_BODY), ("completion", {"model": "policy", "prompt": "x"})):
            with pytest.raises(BadField) as refused:
                check(kind, body | {name: value}, "cpu")  # type: ignore[arg-type]
            assert refused.value.param == name


# ------------------------------------------------------------------ grammars that would hold up everybody


def tools(count: int, **function: Any) -> list[dict[str, Any]]:
    schema = {
        "type": "object",
        "properties": {f"a{j}": {"type": "string", "description": "an argument"} for j in range(5)},
    }
    names = [f"tool_{number}" for number in range(count)]
    return [
        {"type": "function", "function": {"name": name, "parameters": schema, **function}} for name in names
    ]


def described(name: str, strict: bool | None = None, **schema: Any) -> dict[str, Any]:
    """A tool whose argument `a` has this schema; a value that is a dictionary is an argument beside it."""
    beside = {key: value for key, value in schema.items() if isinstance(value, dict)}
    argument = {key: value for key, value in schema.items() if key not in beside}
    properties = {"a": {"type": "string", **argument}, **beside}
    function = {"name": name, "parameters": {"type": "object", "properties": properties}, "strict": strict}
    return {"type": "function", "function": function}


def forced(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("tools", {"tools": tools(2000), "tool_choice": "required"}),
        ("tools", {"tools": tools(2000, strict=True)}),
        ("tools", {"tools": tools(2000), "parallel_tool_calls": False}),
        ("tools", {"tools": [described("tool_0", strict=True, enum=[{"title": "x" * 200_000}])]}),
        ("tools", {"tools": [described("tool_0", strict=True, description={"pattern": "x" * 200_000})]}),
        ("tools", {"tool_choice": forced("x"), "tools": [described("x", title={"enum": ["x" * 200_000]})]}),
        ("response_format", {"response_format": {"json_schema": {"schema": {"enum": ["x" * 9] * 20_000}}}}),
        ("structured_outputs", {"structured_outputs": {"regex": "(a|b)" * 40_000}}),
    ],
)
def test_r05_a_grammar_that_would_hold_up_all_other_requests_is_refused(
    name: str, fields: dict[str, Any]
) -> None:
    with pytest.raises(BadField, match="characters for a grammar") as refused:
        check_grammar_size(CHAT_BODY | fields)
    assert refused.value.param == name


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": tools(2000)},
        {"tools": tools(2000), "tool_choice": "none"},
        {"tools": tools(2000), "tool_choice": None, "parallel_tool_calls": True},
        {"tools": tools(128, strict=True), "tool_choice": "required"},
        {"response_format": None, "structured_outputs": {"choice": ["a", "b"]}},
        # What no grammar is made of has no bound: descriptions, titles, examples.
        {"tools": [described("x", description="x" * 200_000)], "tool_choice": "required"},
        {"tools": [described("x", strict=True, title="x" * 200_000, examples=["x" * 200_000])]},
        {"tools": tools(128, strict=True, description="x" * 2000)},
        # Nor tools beside the forced one, and the arguments of those that are not strict.
        {"tools": [*tools(2000), described("x")], "tool_choice": forced("x")},
        {"tools": [described("x", enum=["x" * 200_000]), described("y", strict=True)]},
        {"tools": [described("x", enum=["x" * 200_000])], "parallel_tool_calls": False},
    ],
)
def test_r05_openais_number_of_tools_and_tools_without_a_grammar_pass(fields: dict[str, Any]) -> None:
    check_grammar_size(CHAT_BODY | fields)
