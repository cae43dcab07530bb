"""What DSPy's adapters sample in one form and train in another has one name, by the adapters themselves."""

from __future__ import annotations

import enum
import itertools
import json
import random
import re
import time
from collections.abc import Iterator
from typing import Any, Literal

import dspy
import pydantic
import pytest
from dspy.adapters import ChatAdapter, JSONAdapter, XMLAdapter
from dspy.adapters.baml_adapter import BAMLAdapter
from dspy.utils.exceptions import AdapterParseError
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from runtime.gateway.samples import parsed_fields
from runtime.gateway.samples.parsed_fields import Names, names

CHAT, XML, JSON, BAML = ChatAdapter(), XMLAdapter(), JSONAdapter(), BAMLAdapter()
# Its class looks to a type checker like what is made of it.
of_fields: Any = dspy.Signature


class Colour(enum.Enum):
    red = "red"
    blue = "blue"


class Address(pydantic.BaseModel):
    street: str
    number: int | None = None


class Person(pydantic.BaseModel):
    """Somebody: `known` is not always said."""

    name: str
    age: int
    weight: float = 70.0
    known: bool = False
    tags: list[str] = []
    home: Address | None = None


TYPES: dict[str, Any] = {
    "text": str, "flag": bool, "count": int, "share": float, "words": list[str], "numbers": list[int],
    "shares": list[float], "flags": list[bool], "label": Literal["yes", "no", "don't know"],
    "grade": Literal[1, 2, 3], "maybe": str | None, "some": int | None, "colour": Colour, "person": Person,
    "people": list[Person], "table": dict[str, int], "any_table": dict[str, Any], "rows": list[list[str]],
}  # fmt: skip
TRICKS = [
    "plain", "", "two\n\nparagraphs", "<answer>\nnot this\n</answer>", "[[ ## answer ## ]]\nnor this",
    "a\n\n[[ ## passage ## ]]\nb", "a\n</question>\n\n<passage>\nb", "<passage>", "</question>", "«»",
    "Respond with the corresponding output fields wrapped in XML tags `<answer>`.",
    "a\n\nRespond with the corresponding output fields, starting with the field `[[ ## answer ## ]]`.",
    "Your output fields are:\n1. `other` (str):", "All interactions will be structured in the following way",
    "x < y && y > z &lt; &amp; &amp;lt;", "  white  ", "<think>hm</think>",
    '{"answer": "x"}', "[[ ## completed ## ]]",
    "In adhering to this structure, your objective is:", "\u2028line\x0bend\r\n", "1. `question` (str):",
    "ünïcode 猫",
]  # fmt: skip


def signature(
    outputs: dict[str, Any], inputs: tuple[str, ...] = ("question", "passage"), says: str = "Do it."
) -> Any:
    fields: dict[str, Any] = {name: (str, dspy.InputField()) for name in inputs}
    fields |= {name: (kind, dspy.OutputField()) for name, kind in outputs.items()}
    return of_fields(fields, says)


def written(signature: Any, inputs: dict[str, Any], outputs: dict[str, Any], adapter: Any = XML) -> Names:
    """The names of what a client trains: what it parsed, written again, without demonstrations."""
    messages = adapter.format_finetune_data(signature, [], inputs, outputs)["messages"]
    found = names(messages[:-1], messages[-1]["content"])
    assert found is not None
    return found


def sampled(signature: Any, inputs: dict[str, Any], said: str, adapter: Any = CHAT, demos: Any = ()) -> Names:
    found = names(adapter.format(signature, list(demos), inputs), said)
    assert found is not None
    return found


def chat(values: dict[str, str]) -> str:
    """What a model says to the chat adapter's prompt."""
    return (
        "".join(f"[[ ## {name} ## ]]\n{value}\n\n" for name, value in values.items())
        + "[[ ## completed ## ]]"
    )


# ------------------------------------------------------------------ one name


SAID: dict[str, list[str]] = {
    "text": TRICKS[:1] + TRICKS[2:4] + [TRICKS[8], *TRICKS[10:]],
    "flag": ["true", "True", "false", "False", '"true"', "1", "0", "yes"],
    "count": ["3", "-17", " 42 ", "0", "3.0"],
    "share": ["3", "0.5", "1e3", "-2.50"],
    "words": ['["a", "b"]', "[]", "['it is', 'b']", '["<item>", "a & b", ""]', '["true", "1", "1.0"]',
              '["  a\\n\\nb "]'],
    "numbers": ["[1, 2]", '["1", 2]', "[3.0]"],
    "shares": ["[1, 2.5]", '["0.50"]'],
    "flags": ["[true, false]", "[True, False]"],
    "label": ["yes", '"no"', "'yes'", "Literal[no]", "don't know"],
    "grade": ["1", "3"],
    "maybe": ["None", "null", "something", "<b>bold</b> & so", "5"],
    "some": ["5", "null", "None"],
    "colour": ["red", "blue"],
    "person": [
        '{"name": "Ann <x>", "age": 30}', '{"age": "31", "name": "B", "weight": 60, "tags": ["x", "y"]}',
        '{"name": "C", "age": 2, "home": {"street": "x\\ny", "number": 3}, "known": "true"}',
        '```json\n{"name": "D", "age": 4, "home": null, "unknown": 5}\n```',
    ],
    "people": ["[]", '[{"name": "A", "age": 1}, {"name": "B", "age": 2}]'],
    "table": ["{}", '{"a b": 1, "c": "2", "item": 3}', '{"item": 1}', "{'x': 1}"],
    "any_table": ['{"a": {"b": [1, true, null, "t"]}, "2x": "<y>"}'],
    "rows": ['[["a"], [], ["b", "c"]]'],
}  # fmt: skip


def cases() -> Iterator[tuple[str, str]]:
    for kind, texts in SAID.items():
        for text in texts:
            yield kind, text


def framed(said: str) -> list[str]:
    """The same answer as models frame it."""
    return [
        said,
        f"Sure! Here it is.\n{said}",
        f"<think>\nhm [[ ## x\n</think>\n\n{said}",
        f"  {said}\n\nI hope this helps.",
    ]


@pytest.mark.parametrize("kind", SAID)
def test_a10_what_was_sampled_as_chat_has_the_name_of_what_is_trained_as_xml(kind: str) -> None:
    of = signature({"reasoning": str, "answer": TYPES[kind], "note": str})
    missed = []
    for text, (question, passage) in itertools.product(SAID[kind], [("q", "p"), (TRICKS[5], TRICKS[6])]):
        inputs = {"question": question, "passage": passage}
        for said in framed(chat({"reasoning": "so <b> & it\n\nis", "answer": text, "note": "n"})):
            parsed = CHAT.parse(of, said)
            if sampled(of, inputs, said).parsed != written(of, inputs, parsed).parsed:
                missed.append((text, parsed["answer"]))
    assert missed == []


@pytest.mark.parametrize("trick", TRICKS)
def test_a10_an_input_may_say_anything(trick: str) -> None:
    of = signature({"answer": str})
    for inputs in (
        {"question": trick, "passage": "p"},
        {"question": "q", "passage": trick},
        {"question": trick, "passage": trick},
    ):
        said = chat({"answer": "yes"})
        name = sampled(of, inputs, said).parsed
        assert name is not None and name == written(of, inputs, CHAT.parse(of, said)).parsed
        assert name != written(of, inputs, {"answer": "no"}).parsed
        assert name != written(of, inputs | {"passage": "another"}, {"answer": "yes"}).parsed


@pytest.mark.process
def test_a10_thousands_of_mixed_answers_are_found_at_least_99_in_100() -> None:
    """A program of two modules over many rollouts: each training text finds a sample that said the same."""
    chance = random.Random(0)
    first = signature({"reasoning": str, "query": str}, ("question",), "Write a query.")
    kinds = [*SAID]
    total = found = 0
    for _ in range(1_000):
        kind = chance.choice(kinds)
        second = signature({"reasoning": str, "answer": TYPES[kind]}, ("question", "query"))
        inputs = {"question": chance.choice(TRICKS), "query": chance.choice(TRICKS)}
        said = chat({"reasoning": chance.choice(SAID["text"]), "query": chance.choice(SAID["text"])})
        answer = chat({"reasoning": chance.choice(SAID["text"]), "answer": chance.choice(SAID[kind])})
        for of, text in ((first, said), (second, answer)):
            text = chance.choice(framed(text))
            parsed = CHAT.parse(of, text)
            total += 1
            found += sampled(of, inputs, text).parsed == written(of, inputs, parsed).parsed is not None
    print(f"A10: {found} of {total} training texts have the name of the sampled text")
    assert found >= 0.99 * total


@pytest.mark.parametrize("kind", SAID)
def test_a10_json_and_xml_answers_have_the_name_too(kind: str) -> None:
    """The chat adapter falls back to JSON; who samples by the XML adapter trains its text written anew."""
    of = signature({"answer": TYPES[kind], "note": str})
    inputs = {"question": "q", "passage": TRICKS[5]}
    for text in SAID[kind]:
        value = CHAT.parse(of, chat({"answer": text, "note": "n <"}))
        as_json = JSON.format_assistant_message_content(of, value)
        for said in (as_json, f"Here:\n```json\n{as_json}\n```"):
            trained = written(of, inputs, JSON.parse(of, said)).parsed
            assert [sampled(of, inputs, said, adapter).parsed for adapter in (JSON, BAML)] == [trained] * 2
        as_xml = XML.format_assistant_message_content(of, value)
        if "<b>" not in text and kind != "any_table":  # which itself reads as something else than it wrote
            assert (
                sampled(of, inputs, f"Well:\n{as_xml}", XML).parsed
                == written(of, inputs, XML.parse(of, as_xml)).parsed
            )
        assert (
            sampled(of, inputs, chat({"answer": text, "note": "n <"})).parsed
            == written(of, inputs, value, CHAT).parsed
        )


def test_a10_demonstrations_are_sampled_and_not_trained_but_a_conversation_is() -> None:
    of = signature({"answer": str})
    inputs = {"question": "q", "passage": "p"}
    demos = [inputs | {"answer": "earlier"}, {"question": "half", "answer": "x"}]
    given, plain = (
        sampled(of, inputs, chat({"answer": "a"}), demos=demos),
        written(of, inputs, {"answer": "a"}),
    )
    assert (
        given.parsed != plain.parsed
        and given.parsed_of_any_turns == plain.parsed_of_any_turns
        and not plain.has_turns
    )
    asks = {"question": (str, dspy.InputField()), "history": (dspy.History, dspy.InputField())}
    talk = of_fields(asks | {"answer": (str, dspy.OutputField())})
    histories = [dspy.History(messages=[{"question": "before", "answer": said}]) for said in ("x", "y <")]
    found = [sampled(talk, {"question": "q", "history": one}, chat({"answer": "a"})) for one in histories]
    again = [written(talk, {"question": "q", "history": one}, {"answer": "a"}) for one in histories]
    assert [one.parsed for one in found] == [one.parsed for one in again]
    assert found[0].parsed != found[1].parsed and found[0].has_turns


def test_a10_an_answer_that_could_not_be_parsed_is_known_by_its_text() -> None:
    of = signature({"answer": str, "note": str})
    inputs = {"question": "q", "passage": "p"}
    for said in ("no marks", chat({"answer": "only this"}), "", "<answer>\nx\n</answer>"):
        with pytest.raises(AdapterParseError):
            CHAT.parse(of, said)
        given = sampled(of, inputs, said)
        assert given.parsed is None
        trained = names(XML.format(of, [], inputs), said)
        assert trained is not None and trained.exact == given.exact
        # Of a later module that failed, what the program was given is the question, as far as it fits.
        part = names(XML.format(of, [], {"question": "q"}), said)
        assert part is not None and part.raw == given.raw and part.inputs < given.inputs
        other = names(XML.format(of, [], {"question": "other"}), said)
        assert other is not None and not other.inputs < given.inputs and other.exact != given.exact


SHOWN_IN_PART = [
    '[[ ## facts ## ]]\n[{"a": {"b": "c"}}, {"a": "d"}]\n\n[[ ## completed ## ]]',
    '[[ ## facts ## ]]\n[{"a": "}{"}, {"b": 2}]', '<think>{"a": 1}</think>[[ ## x ## ]]\n["b"] {"c": 2} {',
    '\n<think>[1] {"a": 1}</think>\n["b"]', '<thinking>[1] {"a": 1}</thinking>["b"] {"c": 2}',
    "[[ ## x ## ]] [1] {{{}", "[[ ## x ## ]] [1] }{", 'so {"a": 1}', '{"a": 1}', "no {braces", "",
]  # fmt: skip


@pytest.mark.parametrize("adapter", [JSON, BAML], ids=["json", "baml"])
@pytest.mark.parametrize("said", SHOWN_IN_PART)
def test_a10_of_an_answer_that_could_not_be_parsed_the_json_adapter_may_show_an_object_alone(
    said: str, adapter: Any
) -> None:
    of = signature({"answer": str, "note": str})
    inputs = {"question": "q", "passage": "p"}
    given = sampled(of, inputs, said, adapter)
    # What it reads has the thoughts in it, or not: as the client's engine has it.
    for read in (said, re.sub(r"\A<(\w+)>.*</\1>", "", said)):
        with pytest.raises(AdapterParseError) as seen:
            adapter.parse(of, read)
        shown = seen.value.lm_response
        trained = names(XML.format(of, [], inputs), shown)
        assert trained is not None and {trained.exact, trained.object} & {*given.all}
        # Of a later module, and of one with turns before it.
        part = names(XML.format(of, [], {"question": "q"}), shown)
        assert part is not None and part.raw in given.all and part.inputs < given.inputs
        demos = [inputs | {"answer": "earlier", "note": "n"}]
        turned = sampled(of, inputs, said, adapter, demos)
        assert not {trained.exact, trained.object} & {*turned.all}
        assert {trained.exact_of_any_turns, trained.object_of_any_turns} & {*turned.all}
    # No other adapter does so.
    assert not sampled(of, inputs, said).of_objects and not trained.of_objects


def test_what_a_field_may_leave_out_is_nothing() -> None:
    of = signature({"answer": str, "note": str | None})
    inputs = {"question": "q", "passage": "p"}
    said = chat({"answer": "a"})
    assert sampled(of, inputs, said).parsed == written(of, inputs, CHAT.parse(of, said)).parsed


# ------------------------------------------------------------------ no other name


def test_a10_the_task_and_its_question_are_part_of_the_name() -> None:
    """Two predictors with the same outputs, and other inputs, instructions or descriptions."""
    said = chat({"answer": "yes"})
    tasks = [
        signature({"answer": str}), signature({"answer": str}, ("question", "context")),
        signature({"answer": str}, says="Do something else."), signature({"answer": bool}),
        signature({"answer": str}, ("passage", "question")),
    ]  # fmt: skip
    inputs = {"question": "q", "passage": "p", "context": "p"}
    given = [sampled(of, inputs, said).parsed for of in tasks]
    assert len({*given, sampled(tasks[0], inputs | {"question": "p", "passage": "q"}, said).parsed}) == 6


def test_a10_fields_are_named_by_the_system_message_and_not_by_the_answer() -> None:
    of = signature({"answer": str})
    inputs = {"question": "q", "passage": "p"}
    plain = sampled(of, inputs, chat({"answer": "yes"}))
    more = sampled(of, inputs, chat({"extra": "mine", "answer": "yes", "other": "no"}))
    assert plain.parsed == more.parsed == written(of, inputs, {"answer": "yes"}).parsed
    assert sampled(of, inputs, chat({"answers": "yes"})).parsed is None
    twice = chat({"answer": "yes"}) + chat({"answer": "no"})
    assert (
        sampled(of, inputs, twice).parsed == written(of, inputs, CHAT.parse(of, twice)).parsed == plain.parsed
    )


TEXTS = st.one_of(
    st.text(max_size=12), st.sampled_from(TRICKS), st.text("<>&;ltamp/ansewr[]# \n", max_size=20)
)


@pytest.mark.process
@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(TEXTS, TEXTS, TEXTS, TEXTS)
def test_a10_different_answers_never_share_a_name(one: str, two: str, other_one: str, other_two: str) -> None:
    of = signature({"answer": str, "note": str})
    inputs = {"question": "q", "passage": "p"}
    parsed = [CHAT.parse(of, chat({"answer": a, "note": b})) for a, b in ((one, two), (other_one, other_two))]
    assume(all(value == "\n".join(value.splitlines()).strip() for it in parsed for value in it.values()))
    given = [sampled(of, inputs, CHAT.format_assistant_message_content(of, it)).parsed for it in parsed]
    trained = [written(of, inputs, it).parsed for it in parsed]
    assert given == trained
    assert (given[0] == given[1]) == (parsed[0] == parsed[1])


VALUES = st.recursive(
    st.one_of(st.text(max_size=5), st.integers(-5, 5), st.booleans()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


@pytest.mark.process
@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.dictionaries(st.text(max_size=4), VALUES, max_size=3),
    st.dictionaries(st.text(max_size=4), VALUES, max_size=3),
)
def test_a10_nested_values_have_the_name_of_what_is_written_of_them(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    of = signature({"answer": dict[str, Any]})
    inputs = {"question": "q", "passage": "p"}
    given = [sampled(of, inputs, chat({"answer": json.dumps(it)})).parsed for it in (one, other)]
    trained = [written(of, inputs, {"answer": it}) for it in (one, other)]
    assert given == [it.parsed for it in trained] and None not in given
    texts = [XML.format_assistant_message_content(of, {"answer": it}) for it in (one, other)]
    assume(texts[0] != texts[1])
    # What differs only in the order of its names is one value.
    assert (given[0] == given[1]) == (_sorted(one) == _sorted(other))


def _sorted(value: Any) -> Any:
    """A value as its leaves are written, an object by its names."""
    if isinstance(value, dict):
        return _pairs([[name, _sorted(it)] for name, it in value.items()], "")
    if isinstance(value, list):
        return _pairs([["item", _sorted(it)] for it in value], None)
    return str(value)


def _pairs(pairs: list[Any], empty: Any) -> Any:
    if not pairs:
        return empty
    return pairs if all(name == "item" for name, _ in pairs) else sorted(pairs, key=lambda pair: pair[0])


# ------------------------------------------------------------------ bounds


HOSTILE = {
    "braces": "{" * 200_000, "objects": '{"a":' * 60_000, "lists": "[" * 200_000, "tags": "<a>" * 100_000,
    "closers": "</answer>" * 40_000, "openers": "<answer>" * 40_000, "marks": "[[ ## answer ## ]]\n" * 20_000,
    "inputs": "[[ ## passage ## ]]\n" * 20_000, "half marks": "[[ ## " * 60_000, "white": " \n" * 190_000,
    "unclosed": "<answer " * 50_000, "quotes": '<entry key="' * 30_000, "entities": "&" * 390_000,
    "reminders": "Respond with the corresponding output fields wrapped in XML tags `<" * 5_000,
    "objects open": '{"a": "b", ' * 35_000, "braces that match": "{" * 195_000 + "}" * 194_000,
    "minus": "-" * 390_000, "brackets": "(" * 9_000, "digits": "9" * 390_000,
}  # fmt: skip


@pytest.mark.process
@pytest.mark.parametrize("adapter", [CHAT, XML, JSON], ids=["chat", "xml", "json"])
@pytest.mark.parametrize("kind", HOSTILE)
def test_g30_a_hostile_text_costs_no_time(kind: str, adapter: Any) -> None:
    """Counted in the processor's own time: an hour of the others' is none of it."""
    text = HOSTILE[kind]
    of = signature({"answer": list[str], "note": str})
    begun = time.process_time()
    for inputs, said in (
        ({"question": "q", "passage": "p"}, text),
        ({"question": text, "passage": "p"}, "no"),
    ):
        messages = adapter.format(of, [], inputs)
        names(messages, said)
        names(messages, chat({"answer": said, "note": "n"}))
        names(messages, f"<answer>{said}</answer>\n\n<note>\nn\n</note>")
    assert time.process_time() - begun < 3


def test_what_is_too_long_or_no_adapters_has_no_name() -> None:
    of = signature({"answer": str})
    messages = CHAT.format(of, [], {"question": "q" * parsed_fields.MAX_CHARACTERS, "passage": "p"})
    assert names(messages, "a") is None and parsed_fields.may_have(messages)
    system, user = CHAT.format(of, [], {"question": "q", "passage": "p"})
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    for other in (
        [user],
        [system],
        [],
        [system, system],
        [{"role": "system", "content": "Be kind."}, user],
        [system, picture],
    ):
        assert names(other, "a") is None
    fields = "\n".join(f"{number}. `f{number}` (str):" for number in range(1, 5_000))
    many = system["content"].replace("1. `answer` (str):", fields)
    assert names([{"role": "system", "content": many}, user], "a") is None
    parts = [
        {"role": one["role"], "content": [{"type": "text", "text": one["content"]}]} for one in (system, user)
    ]
    assert names(parts, "a") == names([system, user], "a") and parsed_fields.may_have(parts)
    deep = signature({"answer": list[Any]})
    assert sampled(deep, {"question": "q"}, chat({"answer": "[" * 300 + "]" * 300})).parsed is None
