"""Clients that cannot tag: what they name by content is trained with the engine's ids; the rest from text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.gateway.samples import content_key
from runtime.shared.batch import read_batch
from runtime.shared.schema import Group, Member
from tests.runtime.conftest import RunningEngine
from tests.runtime.gateway_process import MESSAGES, Gateway
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture
def gateway(engine: RunningEngine, tmp_path: Path) -> Iterator[Gateway]:
    running = Gateway(tmp_path, engine.socket, engine.model).until_ready()
    yield running
    running.stop()


def step(gateway: Gateway, key: str, members: list[dict[str, Any]]) -> dict[str, Any]:
    """Send a step; its counts. Answers that are cut off, as some are by chance, are trained as well."""
    kept = {"overlong": "keep"}
    body = {"key": key, "groups": [{"id": "g", "members": members}], "settings": kept}
    answer = gateway.http.post("/slipway/steps", json=body)
    details = answer.json()
    return details["counts"] if answer.status_code == 202 else details["error"]["counts"]


def member(text: str, reward: float | None, messages: Any = MESSAGES) -> dict[str, Any]:
    return {"messages": messages, "completion": text, "reward": reward}


def said(gateway: Gateway, **fields: Any) -> str:
    answer = gateway.chat(max_tokens=24, temperature=1.0, **fields)
    assert answer.status_code == 200, answer.text
    if not fields.get("stream"):
        return answer.json()["choices"][0]["message"]["content"]
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])


def rows(gateway: Gateway, number: int) -> list[tuple[list[int], list[int]]]:
    """The batch the trainer gets: (ids, which were sampled) of each sequence."""
    folder = gateway.folder / "steps" / f"{number:06d}"
    wait_until(folder.exists)
    batch = read_batch(folder)
    spans = [batch.span(row) for row in range(batch.sequences)]
    return [(batch.tokens[span].tolist(), batch.sampled[span].tolist()) for span in spans]


def test_an_untagged_answer_is_matched_by_content_and_trained_with_the_engines_ids(gateway: Gateway) -> None:
    texts = [said(gateway, stream=index % 2 == 1) for index in range(4)]
    parts = [{"role": "user", "content": [{"type": "text", "text": MESSAGES[0]["content"]}], "name": None}]
    members = [member(f"{text}\n", float(index), parts) for index, text in enumerate(texts)]
    counts = step(gateway, "k", members)
    assert (counts["trained"], counts["retokenised"], counts["dropped"]) == (4, 0, {})
    lines = gateway.recorded()
    sampled = [line["prompts"][0] + line["samples"][0]["completion_ids"] for line in lines]
    assert sorted(ids for ids, _ in rows(gateway, 1)) == sorted(sampled)
    again = step(gateway, "k2", members)
    assert again["dropped"] == {"already trained": 4}


def test_a_copy_of_an_answer_is_not_another_sample_and_evaluation_stays_out(gateway: Gateway) -> None:
    text = said(gateway)
    held_out = [{"role": "user", "content": "held out"}]
    evaluated = said(gateway, headers={"x-slipway-purpose": "eval"}, messages=held_out)
    asked = [{"role": "user", "content": "asked beside it"}]
    other = member(said(gateway, messages=asked), 0.0, asked)
    members = [member(text, 1.0), member(text, 1.0), other, member(evaluated, 0.0, held_out)]
    counts = step(gateway, "k", members)
    assert counts["dropped"] == {"named twice": 1, "evaluation": 1}
    assert (counts["trained"], counts["retokenised"]) == (2, 0)


def test_a_text_nobody_sampled_is_trained_on_the_engines_ids_of_it_and_counted(gateway: Gateway) -> None:
    members = [member("[[ ## french ## ]]\nle chat noir", 1.0), member(said(gateway), 0.0)]
    refused = [member("", 0.0), member("never judged", None)]
    counts = step(gateway, "k", members + refused)
    assert (counts["trained"], counts["retokenised"], counts["samples"]) == (2, 1, 2)
    assert counts["dropped"] == {
        "text not trainable: the chat template changes it": 1, "no reward": 1,
    }  # fmt: skip
    made, served = rows(gateway, 1)
    assert served[1].count(1) > 0
    (line,) = [line for line in gateway.recorded() if line["samples"][0].get("retokenised")]
    assert made[0] == line["prompts"][0] + line["samples"][0]["completion_ids"]
    assert made[0][-1] == 2  # what ends an answer in this template
    # The same question, rendered as for an answer.
    texts = [line for line in gateway.recorded() if not line["samples"][0].get("retokenised")]
    assert [one["prompts"] for one in texts] == [line["prompts"]]
    assert all(value < 0 for value in line["samples"][0]["logprobs"])
    # The next process of the gateway knows it too, and the step is the same step.
    gateway.kill()
    gateway.start()
    gateway.until_ready()
    assert step(gateway, "k", members + refused)["retokenised"] == 1
    assert step(gateway, "k2", members)["dropped"] == {"already trained": 2}


def test_a_member_is_about_one_thing() -> None:
    for fields in ({}, {"rollout": "r", "sample": "s"}, {"messages": MESSAGES}, {"completion": "x"}):
        with pytest.raises(ValueError, match="a member must have"):
            Member(**fields)
    given = Member(messages=MESSAGES, completion="x", reward=1.0)
    assert Group.model_validate_json(Group(id="g", members=[given]).model_dump_json()).members == [given]


def test_content_has_one_name_however_it_is_written() -> None:
    plain = content_key.key([{"role": "user", "content": "a"}], "b")
    parts = {"content": [{"type": "text", "text": "a"}], "role": "user", "tool_calls": None}
    assert content_key.key([parts], " b\n") == plain
    others = [([{"role": "user", "content": "b"}], "a"), ([], "ab"), (["\ud800"], "\udc00")]
    assert len({plain, *(content_key.key(messages, text) for messages, text in others)}) == 4
