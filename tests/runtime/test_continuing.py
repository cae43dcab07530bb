"""Which earlier answer a request goes on from, and in which ids, by chat templates as families write them.

The templates are rendered by transformers, as vLLM has them rendered; only the engine's HTTP is left out.
"""

from __future__ import annotations

import asyncio
import json
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest

from runtime.gateway.completions.prefix_continuation import ChatTurn, PrefixContinuation
from runtime.gateway.engines.engine_client import EngineError, EngineFacts
from runtime.gateway.samples.samples import SampleStore
from tests.runtime.recorded import answer, asked, choice, record
from tests.runtime.test_turns import CALLING, DATED, EOS, PLAIN, THINKING, TOKENIZER, pick

Message = dict[str, Any]

# Qwen3: thoughts only after the last question, a tool's result as a user's, a last answer with a thought.
LOOPING = """{% set at = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set at.last = loop.index0 %}{% endif %}{% endfor %}
{%- if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}
{%- for m in messages %}{% set text = (m.content or '').split('</think>')[-1].lstrip('\n') %}
{%- if m.role == 'tool' %}{{ '<|im_start|>user\n<tool_response>\n' + text }}
{{- '\n</tool_response><|im_end|>\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' and loop.index0 > at.last and loop.last %}<think>

</think>

{% endif %}
{{- text }}{% for call in m.tool_calls or [] %}{{ '\n<tool_call>\n{"name": "' + call.function.name }}
{{- '", "arguments": ' }}{{ call.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

ASKED = {"role": "user", "content": "the red cat"}
MORE = {"role": "user", "content": "and the black dog"}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "a cat"}
SYSTEM = {"role": "system", "content": "it is noon"}
THOUGHT = "<think>\na cat\n</think>\n\nle chat rouge"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
WRITTEN = '<tool_call>\n{"name":"look","arguments":{"at":"the cat"}}\n</tool_call>'
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at":"the cat"}'}}


def ids(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False).input_ids


class Renderer:
    """An engine that renders, and does nothing else."""

    name = "engine-0"

    def __init__(self, template: str, context: int = 4096) -> None:
        self.template = template
        self.day = date(2026, 11, 21)
        self.facts = EngineFacts(context_length=context)
        self.asked = 0
        self.is_gone = False

    async def render(self, body: dict[str, Any]) -> list[int]:
        self.asked += 1
        if self.is_gone:
            raise EngineError(self.name, 500, "gone")
        shown = TOKENIZER.apply_chat_template(
            [_parsed(message) for message in body["messages"]],
            tools=body.get("tools"),
            chat_template=self.template,
            add_generation_prompt=body.get("add_generation_prompt", True),
            tokenize=False,
            strftime_now=self.day.strftime,
            **body.get("chat_template_kwargs", {}),
        )
        return ids(str(shown))


def _parsed(message: Message) -> Message:
    """As vLLM gives messages to a template: the arguments of calls as values."""
    calls = [
        call | {"function": call["function"] | {"arguments": json.loads(call["function"]["arguments"])}}
        for call in message.get("tool_calls") or ()
    ]
    return message | {"tool_calls": calls} if calls else message


class Talk:
    """A conversation with a policy that says what it is told to."""

    def __init__(self, folder: Path, template: str, rollout: str | None = "r", **settings: Any) -> None:
        self.folder, self.rollout, self.settings = folder, rollout, settings
        self.store = SampleStore(folder)
        self.engine = Renderer(template)
        self.continuing = PrefixContinuation(self.store, enabled=True)
        self.samples: list[str] = []
        # Of the last exchange.
        self.prompt: list[int] = []
        self.completion: list[int] = []

    def say(self, messages: list[Message], *texts: str, **fields: Any) -> ChatTurn:
        """Ask, and record an answer that was sampled as these ids; its message comes by `reply`."""
        finish, replies = fields.pop("finish", "stop"), fields.pop("replies", None)
        end = fields.pop("end", [EOS])
        request = asked(rollout=self.rollout, messages=messages, **(self.settings | fields))
        body = {name: value for name, value in request.body.items() if name != "model"}
        turn = asyncio.run(self.continuing.turn(request, body, self.engine))  # type: ignore[arg-type]
        assert turn is not None
        given = (turn.fields or {}).get("kv_transfer_params", {}).get("prompt_token_ids")
        self.prompt = given or asyncio.run(self.engine.render(body))
        choices = []
        for index, text in enumerate(texts):
            self.completion = [*ids(text), *end]
            one = choice(self.completion, [-1.0] * len(self.completion), text, index)
            reply = replies[index] if replies else {"content": text}
            message = {"role": "assistant"} | reply
            choices.append(one | {"message": message, "finish_reason": finish})
        self.samples += record(self.store, request, answer(self.prompt, *choices), turn=turn)
        return turn

    def again(self) -> None:
        """After a restart of the gateway."""
        self.store = SampleStore(self.folder)
        self.continuing = PrefixContinuation(self.store, enabled=True)


def said(text: str | None, *calls: Message, **fields: Any) -> Message:
    """An assistant's message."""
    called = {"tool_calls": list(calls)} if calls else {}
    return {"role": "assistant", "content": text} | called | fields


# ------------------------------------------------------------------ what goes on, and in which ids


CONTINUED = {
    "thoughts stripped": (THINKING, THOUGHT, said(THOUGHT), [MORE], "\n<|im_start|>user\nand the black dog"),
    "thoughts that are not sent again": (
        THINKING, THOUGHT, said("le chat rouge"), [MORE], "\n<|im_start|>user\nand the black dog",
    ),
    "text that tokenises otherwise": (
        PLAIN.replace("m.content", "m.content | trim"), "le chat rouge ", said("le chat rouge "), [MORE],
        "\n<|im_start|>user\nand the black dog",
    ),
    "a call written anew": (
        CALLING, WRITTEN, said(None, CALL), [RESULT, MORE],
        "\n<|im_start|>tool\na cat<|im_end|>\n<|im_start|>user\nand the black dog",
    ),
    "a call in a loop of tools": (
        LOOPING, THOUGHT + WRITTEN, said("le chat rouge", CALL), [RESULT],
        "\n<|im_start|>user\n<tool_response>\na cat\n</tool_response>",
    ),
    "an answer before a question": (
        LOOPING, THOUGHT, said(THOUGHT), [MORE], "\n<|im_start|>user\nand the black dog",
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", CONTINUED)
@pytest.mark.parametrize("rollout", ["r", None])
def test_joined_whatever_the_template_makes_of_the_answer(
    tmp_path: Path, how: str, rollout: str | None
) -> None:
    template, sampled, reply, more, added = CONTINUED[how]
    talk = Talk(tmp_path, template, rollout)
    talk.say([ASKED], sampled, replies=[reply])
    so_far = talk.prompt + talk.completion
    turn = talk.say([ASKED, reply, *more], "le chien")
    assert talk.prompt == so_far + ids(added + "<|im_end|>\n<|im_start|>assistant\n")
    assert (turn.conversation.continues, turn.conversation.apart) == (talk.samples[0], None)
    assert turn.fields is not None and turn.fields["slipway_last_turn"] == len(so_far)
    if rollout is not None:
        counts = pick(talk.store, rollout).counts
        assert (counts.turns_joined, counts.sealed, counts.sealed_by) == (1, 0, {})


def test_joined_turn_after_turn_through_questions_and_tools(tmp_path: Path) -> None:
    """The template moves what it strips with each question; the ids stay."""
    talk = Talk(tmp_path, LOOPING, tools=[TOOL])
    steps = [
        (THOUGHT + WRITTEN, said("le chat rouge", CALL), RESULT),
        (THOUGHT, said(THOUGHT), MORE),
        (THOUGHT + WRITTEN, said("le chat rouge", CALL | {"id": "c2"}), RESULT | {"tool_call_id": "c2"}),
        (THOUGHT, said(THOUGHT), MORE),
    ]
    messages: list[Message] = [ASKED]
    for number, (sampled, reply, more) in enumerate(steps):
        before = talk.prompt + talk.completion
        turn = talk.say(messages, sampled, replies=[reply])
        assert turn.conversation.apart is None
        assert talk.prompt[: len(before)] == before, number
        messages += [reply, more]
        if number == 1:
            talk.again()
    counts = pick(talk.store, "r").counts
    assert (counts.turns_joined, counts.sealed, counts.trained) == (3, 0, 4)


def test_joined_a_template_that_leaves_answers_alone_is_asked_as_ever(tmp_path: Path) -> None:
    talk = Talk(tmp_path, PLAIN)
    talk.say([ASKED], "le chat")
    assert talk.engine.asked == 1, "a first question is not rendered twice"
    turn = talk.say([ASKED, said("le chat"), MORE], "le chien")
    assert (turn.fields, turn.conversation.continues) == (None, talk.samples[0])


def test_joined_with_the_one_of_several_answers_that_was_sent_again(tmp_path: Path) -> None:
    talk = Talk(tmp_path, THINKING)
    texts = ["<think>\na\n</think>\n\nun", "<think>\nb\n</think>\n\ndeux", "<think>\nc\n</think>\n\ntrois"]
    talk.say([ASKED], *texts, n=3)
    question = talk.prompt
    turn = talk.say([ASKED, said(texts[1]), MORE], "le chien")
    assert turn.conversation.continues == talk.samples[1]
    assert talk.prompt[: len(question + ids(texts[1])) + 1] == [*question, *ids(texts[1]), EOS]


TOLERATED = {
    "fields of nothing": said(None, CALL, refusal=None, audio=None, annotations=[], function_call=None),
    "an empty text": said("", CALL),
    "another id": said(None, CALL | {"id": "mine"}),
    "arguments as the client writes them": said(
        None, CALL | {"function": {"name": "look", "arguments": '{ "at" : "the cat" }'}}
    ),
    "thoughts left out or sent along": said(None, CALL, reasoning="hm", reasoning_content="hm"),
}


@pytest.mark.parametrize("how", TOLERATED)
def test_joined_what_clients_make_anew_changes_no_answer(tmp_path: Path, how: str) -> None:
    talk = Talk(tmp_path, CALLING)
    talk.say([ASKED], WRITTEN, replies=[said(None, CALL)])
    turn = talk.say([ASKED, TOLERATED[how], RESULT | {"tool_call_id": "x"}, MORE], "le chien")
    assert turn.conversation.continues == talk.samples[0] and turn.fields is not None


# ------------------------------------------------------------------ what does not, and why

OTHER_CALL = CALL | {"function": {"name": "look", "arguments": '{"at":"the dog"}'}}
CHANGED = {
    "another text": (said(THOUGHT), said("le chat noir")),
    "white space": (said("le chat "), said("le chat")),
    "another argument": (said(None, CALL), said(None, OTHER_CALL)),
    "another tool": (said(None, CALL), said(None, CALL | {"function": {"name": "see", "arguments": "{}"}})),
    "a call less": (said("le chat", CALL), said("le chat")),
    "a field of its own": (said("le chat"), said("le chat", weight=0)),
}


@pytest.mark.parametrize("how", CHANGED)
def test_joined_with_nothing_that_its_client_changed(tmp_path: Path, how: str) -> None:
    given, sent = CHANGED[how]
    talk = Talk(tmp_path, THINKING if not given.get("tool_calls") else CALLING)
    sampled = (given["content"] or "") + (WRITTEN if given.get("tool_calls") else "")
    talk.say([ASKED], sampled, replies=[given])
    turn = talk.say([ASKED, sent, MORE], "le chien")
    assert (turn.fields, turn.conversation.continues) == (None, None)
    assert turn.conversation.apart == "text was changed by the client"


def why_apart(talk: Talk, *messages: Message, **fields: Any) -> str | None:
    """Ask for the second turn of a talk; why it is not joined to the first."""
    turn = talk.say([*messages], "le chien", **fields)
    assert turn.fields is None
    (reason,) = pick(talk.store, "r").counts.sealed_by
    return reason


def test_b05_what_is_sealed_is_counted_by_its_reason(tmp_path: Path) -> None:
    def begun(name: str, **fields: Any) -> Talk:
        talk = Talk(tmp_path / name, fields.pop("template", THINKING))
        talk.say([SYSTEM, ASKED], THOUGHT, **fields)
        return talk

    later = [SYSTEM, ASKED, said(THOUGHT), MORE]
    evening = {"role": "system", "content": "it is evening"}
    assert why_apart(begun("a"), evening, *later[1:]) == "system prompt changed"
    assert why_apart(begun("b"), *later[:2], said("le chat"), MORE) == "text was changed by the client"
    assert why_apart(begun("c"), *later, tools=[TOOL]) == "tools changed"
    told = {"chat_template_kwargs": {"enable_thinking": False}}
    assert why_apart(begun("d"), *later, **told) == "chat_template_kwargs changed"
    assert why_apart(begun("e", finish="length"), *later) == "cut off"
    cut = begun("o", finish="length")
    cut.say(later, "le chien")
    changed = cut.say([*later, said("un chien"), MORE], "le chat")
    assert changed.conversation.apart == "text was changed by the client", "n16: of the answer after it"
    ended = "the template does not end an answer as it ended"
    assert why_apart(begun("f", end=ids("!")), *later) == ended
    assert why_apart(begun("g"), *later, x_slipway_continue="off") == "switched off"
    one_call: dict[str, Any] = {"tools": [TOOL], "parallel_tool_calls": False}
    several = Talk(tmp_path / "n", CALLING)
    calls = [CALL, CALL | {"id": "c2"}]
    several.say([SYSTEM, ASKED], WRITTEN * 2, replies=[said(None, *calls)], **one_call)
    given = [SYSTEM, ASKED, said(None, CALL), RESULT]
    assert why_apart(several, *given, **one_call) == "calls after the first were left out"
    held = begun("h").say(later, "le chien", response_format={"type": "json_object"})
    assert held.conversation.apart == "held to a grammar"
    full = begun("i")
    full.engine.facts = EngineFacts(context_length=len(full.prompt) + 20)
    assert why_apart(full, *later, max_tokens=10) == "too long for the context"
    gone = begun("j")
    gone.engine.is_gone = True
    turn = asyncio.run(
        gone.continuing.turn(asked(rollout="r", messages=later), {"messages": later}, gone.engine)  # type: ignore[arg-type]
    )
    assert turn is not None and turn.conversation.apart == "the engine did not say"
    dated = begun("k", template=DATED.replace("m.content", "m.content.split('</think>')[-1]"))
    dated.engine.day += timedelta(days=1)
    assert why_apart(dated, *later) == "the template's own text changed"
    other = begun("l")
    assert other.say(later, "le chien", temperature=0.5).fields is not None
    assert pick(other.store, "r").counts.sealed_by == {"other temperature": 1}
    apart = begun("m")
    apart.say([MORE], "un chien")
    assert pick(apart.store, "r").counts.sealed_by == {"another conversation": 1}


def test_r01_a_turn_that_made_one_call_is_gone_on_from(tmp_path: Path) -> None:
    talk = Talk(tmp_path, CALLING, tools=[TOOL], parallel_tool_calls=False)
    talk.say([ASKED], WRITTEN, replies=[said(None, CALL)])
    turn = talk.say([ASKED, said(None, CALL), RESULT], "le chien")
    assert (turn.conversation.continues, turn.conversation.apart) == (talk.samples[0], None)
    assert pick(talk.store, "r").counts.turns_joined == 1


def test_a_run_can_do_without(tmp_path: Path) -> None:
    talk = Talk(tmp_path, THINKING)
    talk.continuing = PrefixContinuation(talk.store, enabled=False)
    talk.say([ASKED], THOUGHT)
    assert why_apart(talk, ASKED, said(THOUGHT), MORE) == "switched off"


def test_another_rollouts_answer_is_not_gone_on_from(tmp_path: Path) -> None:
    talk = Talk(tmp_path, THINKING)
    talk.say([ASKED], THOUGHT)
    for tag in ({"x_slipway_rollout": "s"}, {"x_slipway_predictor": "p"}, {"x_slipway_purpose": "eval"}):
        talk.rollout = None if "x_slipway_rollout" in tag else "r"
        turn = talk.say([ASKED, said(THOUGHT), MORE], "le chien", **tag)
        assert (turn.fields, turn.conversation.continues, turn.conversation.apart) == (None, None, None)


ENDED = "'<|im_start|>' + m.role + '\n' + m.content.split('</think>')[-1] + '<|im_end|>\n'"
EACH = "{% for m in messages %}{{ " + ENDED + " }}{% endfor %}<|im_start|>assistant\n"
UNPROVEN = {
    "an answer that nothing ends": EACH.replace(
        "'<|im_end|>\n'", "('\n' if m.role == 'assistant' else '<|im_end|>\n')"
    ),
    "an answer that is not shown": EACH.replace("in messages", "in messages if m.role == 'user'"),
    "an answer that is shown twice": EACH.replace(ENDED, f"{ENDED} + {ENDED}"),
    "what follows depends on the answer": EACH.replace(
        "{% endfor", "{{ m.content | length if not loop.last }}{% endfor"
    ),
}


@pytest.mark.parametrize("how", UNPROVEN)
def test_joined_not_where_what_follows_cannot_be_proven(tmp_path: Path, how: str) -> None:
    talk = Talk(tmp_path, UNPROVEN[how])
    talk.say([ASKED], THOUGHT)
    turn = talk.say([ASKED, said(THOUGHT), MORE], "le chien")
    assert turn.fields is None and turn.conversation.apart is not None
