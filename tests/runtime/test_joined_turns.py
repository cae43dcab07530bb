"""A conversation that is sent again goes on from its earlier turns, whatever the template makes of it.

On a real engine under a template that rewrites what came earlier: it keeps the end of an earlier answer, as
others do with thoughts, and writes the calls of tools anew.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.shared.batch import Batch, read_batch
from runtime.trainer.forward import pack_logprobs, sequences
from runtime.trainer.packing import pack
from tests.runtime.conftest import TINY_MODEL, EngineProcess, start_engine
from tests.runtime.gateway_process import MESSAGES, Gateway
from tests.runtime.test_from_text import rows, step
from tests.runtime.trainer_fixtures import fresh_policy

Message = dict[str, Any]

REWRITING = """{% if tools %}{{ '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}{% set text = m.content or '' %}
{%- if m.role == 'assistant' and not loop.last %}{% set text = text.split(' ## ]]\\n')[-1] %}{% endif %}
{{- '<|im_start|>' + m.role + '\\n' + text }}
{%- for call in m.tool_calls or [] %}{{ '<tool_call>' + call.function | tojson + '</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

MORE = [
    {"role": "user", "content": f"[[ ## english ## ]]\nthe {animal}"}
    for animal in ("dog", "red cat", "old man")
]
# The tiny model's answers end by themselves before that, whatever is sampled: one cut off would stand alone.
ENOUGH = 300
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def rewriting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """An engine of the tiny model, whose template rewrites history."""
    folder = tmp_path_factory.mktemp("rewriting")
    model = folder / "model"
    shutil.copytree(TINY_MODEL, model)
    (model / "chat_template.jinja").write_text(REWRITING)
    started = start_engine(folder, model_path=str(model))
    started.wait_until_ready()
    yield started
    started.end()


@pytest.fixture(scope="module")
def gateway(rewriting: EngineProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    running = Gateway(tmp_path_factory.mktemp("joined"), rewriting.socket, TINY_MODEL).until_ready()
    yield running
    running.stop()


def said(answer: Any) -> Message:
    """The assistant's message of an answer, whole or streamed, as a client sends it again."""
    assert answer.status_code == 200, answer.text
    if not answer.text.startswith("data:"):
        return answer.json()["choices"][0]["message"]
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    deltas = [one["delta"] for event in events for one in event["choices"]]
    return {"role": "assistant", "content": "".join(delta.get("content") or "" for delta in deltas)}


def talk(gateway: Gateway, rollout: str | None, turns: int = 3, **fields: Any) -> list[Message]:
    """A conversation of so many turns, sent again each time; every other answer is streamed."""
    messages = list(MESSAGES)
    for number in range(turns):
        given = gateway.chat(
            rollout, messages=messages, max_tokens=ENOUGH, temperature=1.0, stream=number % 2 == 1, **fields
        )
        messages += [said(given), MORE[number]]
    return messages


def exchanges(gateway: Gateway, rollout: str | None) -> list[dict[str, Any]]:
    return [line for line in gateway.recorded() if line["tags"]["rollout"] == rollout]


@torch.no_grad()
def trainers(batch: Batch, model: Path) -> torch.Tensor:
    """The trainer's own logprobs of a batch's tokens, joined as they are in it."""
    policy, found = fresh_policy(model=model), torch.zeros(len(batch.tokens))
    for one in pack(sequences(batch), range(batch.sequences), 4096):
        found[one.source_T] = pack_logprobs(policy, one, batch).logprob_T
    return found


def shape(value: Any) -> Any:
    """The names in an answer, without its values."""
    if isinstance(value, dict):
        return {name: shape(it) for name, it in value.items()}
    return [shape(it) for it in value] if isinstance(value, list) else None


@pytest.mark.slow
def test_joined_under_a_template_that_rewrites_history_and_trained_as_sampled(gateway: Gateway) -> None:
    for rollout in ("a", "b"):
        talk(gateway, rollout)
    counts = step(gateway, "joined", [{"rollout": "a", "reward": 0.0}, {"rollout": "b", "reward": 1.0}])
    assert (counts["trained"], counts["turns_joined"], counts["sealed"]) == (6, 4, 0)
    for rollout, (ids, sampled) in zip("ab", rows(gateway, 1), strict=True):
        lines = exchanges(gateway, rollout)
        last = lines[-1]
        assert ids == last["prompts"][0] + last["samples"][0]["completion_ids"]
        flagged = [token for token, flag in zip(ids, sampled, strict=True) if flag]
        assert flagged == [token for line in lines for token in line["samples"][0]["completion_ids"]]
        assert [bool(line["conversation"]["shown"]) for line in lines] == [False, True, True]
    batch = read_batch(gateway.folder / "steps" / "000001")
    mine = trainers(batch, TINY_MODEL)[batch.sampled == 1]
    assert mine.numpy() == pytest.approx(batch.logprobs[batch.sampled == 1], abs=2e-3)


@pytest.mark.slow
def test_joined_without_a_tag_and_after_a_restart_by_the_names_of_its_answers(gateway: Gateway) -> None:
    first = gateway.chat(max_tokens=ENOUGH, temperature=1.0, n=2)
    names = [first.json()["choices"][1]["slipway"]["sample"]]
    messages = [*MESSAGES, first.json()["choices"][1]["message"], MORE[0]]
    gateway.kill()
    gateway.start()
    gateway.until_ready()
    second = gateway.chat(
        messages=messages, max_tokens=ENOUGH, temperature=1.0, headers={"x-slipway-request": "second"}
    )
    again = gateway.chat(
        messages=messages, max_tokens=ENOUGH, temperature=1.0, headers={"x-slipway-request": "second"}
    )
    assert again.content == second.content, "a retry is the same answer"
    names.append(second.json()["choices"][0]["slipway"]["sample"])
    line = next(it for it in gateway.recorded() if it["request"] == "second")
    assert line["conversation"]["continues"] == names[0]
    # What a program sees is what it would see of any other answer.
    assert second.json()["usage"]["prompt_tokens"] == len(line["prompts"][0])
    plainly = gateway.chat(messages=messages, headers={"x-slipway-continue": "off"}, temperature=1.0)
    assert shape(plainly.json()) == shape(second.json())
    assert plainly.json()["usage"]["prompt_tokens"] < len(line["prompts"][0])
    members = [
        {"samples": names, "reward": 1.0},
        {"sample": first.json()["choices"][0]["slipway"]["sample"], "reward": 0.0},
    ]
    counts = step(gateway, "by name", members)
    assert (counts["trained"], counts["turns_joined"], counts["sealed"]) == (3, 1, 0)


@pytest.mark.slow
def test_joined_through_a_call_whose_arguments_the_template_writes_anew(gateway: Gateway) -> None:
    written = '<tool_call>\\n\\{"name":"look",  "arguments": \\{"at":"the cat"\\}\\}\\n</tool_call>'
    held = gateway.chat(
        "tools", tools=[TOOL], max_tokens=200, temperature=1.0, structured_outputs={"regex": written}
    )
    assert held.headers["x-slipway-untrainable"] == "structured_outputs"
    reply = said(held)
    assert [call["function"]["name"] for call in reply["tool_calls"]] == ["look"]
    result = {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": "a cat"}
    messages = [*MESSAGES, reply, result]
    second = gateway.chat("tools", tools=[TOOL], messages=messages, max_tokens=ENOUGH, temperature=1.0)
    messages += [said(second), MORE[0]]
    said(gateway.chat("tools", tools=[TOOL], messages=messages, max_tokens=ENOUGH, temperature=1.0))
    first, *later = exchanges(gateway, "tools")
    assert [bool(line["conversation"]["shown"]) for line in later] == [True, True]
    so_far: list[int] = []
    for line in [first, *later]:
        assert line["prompts"][0][: len(so_far)] == so_far
        so_far = line["prompts"][0] + line["samples"][0]["completion_ids"]
    counts = gateway.counts("tools")
    assert counts["samples"] == 3


@pytest.mark.slow
def test_joined_by_the_gateway_alone_no_client_gives_the_engine_ids(gateway: Gateway) -> None:
    smuggled: list[dict[str, Any]] = [
        {"kv_transfer_params": {"prompt_token_ids": [5, 6, 7]}},
        {"slipway_last_turn": 1},
        {"prompt_token_ids": [5, 6, 7]},
    ]
    for fields in smuggled:
        for tag in ("smuggler", None):
            refused = gateway.chat(tag, **fields)
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == next(iter(fields))
    assert not exchanges(gateway, "smuggler")


@pytest.mark.slow
def test_b05_the_first_sequences_that_were_sealed_are_said_with_what_to_do(gateway: Gateway) -> None:
    first = said(gateway.chat("sealed", max_tokens=ENOUGH, temperature=1.0))
    changed = first | {"content": first["content"] + " (I have read this)"}
    for _ in range(2):
        messages = [*MESSAGES, changed, MORE[0]]
        said(gateway.chat("sealed", messages=messages, max_tokens=ENOUGH, temperature=1.0))
    members = [{"rollout": "sealed", "reward": 1.0}]
    counts = step(gateway, "sealed", members)
    assert (counts["sealed"], counts["sealed_by"]) == (1, {"text was changed by the client": 1})
    (line,) = [it for it in gateway.status()["warnings"] if "sequence" in it]
    assert "text was changed by the client (1). Send the earlier answers again as they were given" in line
    assert (gateway.folder / "gateway.log").read_text().count(line) == 1


UNTRAINABLE: dict[str, dict[str, Any]] = {
    "tool_choice": {"tools": [TOOL], "tool_choice": "required"},
    "response_format": {"response_format": {"type": "json_object"}, "tools": [TOOL]},
    "top_p": {"top_p": 0.9},
    "temperature": {"temperature": 0},
}


@pytest.mark.slow
def test_b06_what_cannot_be_trained_is_said_at_the_first_such_request(gateway: Gateway) -> None:
    for param, fields in UNTRAINABLE.items():
        name = "greedy" if param == "temperature" else param
        for _ in range(2):
            given = gateway.chat("untrainable", **fields)
            assert (given.status_code, given.headers["x-slipway-untrainable"]) == (200, name)
        refused = gateway.chat("untrainable", headers={"x-slipway-untrainable": "refuse"}, **fields)
        assert (refused.status_code, refused.json()["error"]["code"]) == (422, "untrainable")
        assert refused.json()["error"]["param"] == param
        (line,) = [it for it in gateway.status()["warnings"] if f"samples with {name} " in it]
        assert (gateway.folder / "gateway.log").read_text().count(line) == 1
        for untold in (
            {"x-slipway-purpose": "eval"},
            {"x-slipway-purpose": "eval", "x-slipway-untrainable": "refuse"},
        ):
            assert (
                "x-slipway-untrainable" not in gateway.chat("untrainable", headers=untold, **fields).headers
            )
        assert "x-slipway-untrainable" not in gateway.chat(**fields).headers
    whole = gateway.chat("untrainable", headers={"x-slipway-untrainable": "refuse"}, tools=[TOOL])
    assert (whole.status_code, "x-slipway-untrainable" in whole.headers) == (200, False)
    assert len(exchanges(gateway, "untrainable")) == 4 * 4 + 1
