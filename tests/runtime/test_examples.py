"""Examples at the gateway: in the ids that serving renders, or dropped and counted; then a step (C53)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from runtime.shared.batch import Batch, read_batch
from runtime.shared.json_files import write_json
from tests.runtime.conftest import RunningEngine
from tests.runtime.gateway_process import MESSAGES, Gateway
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

ASKED = MESSAGES[0]
AGAIN = {"role": "user", "content": "[[ ## english ## ]]\nthe white dog"}
END = 2  # what ends an answer in the tiny model's template


@pytest.fixture(scope="module")
def gateway(engine: RunningEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    running = Gateway(tmp_path_factory.mktemp("examples"), engine.socket, engine.model).until_ready()
    yield running
    running.stop()


def answered(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def step(gateway: Gateway, key: str, *examples: list[dict[str, Any]], **more: Any) -> int:
    body = {"key": key, "examples": [{"messages": messages} for messages in examples], **more}
    answer = gateway.http.post("/slipway/steps", json=body)
    assert answer.status_code == 202, answer.text
    return answer.json()["id"]


def given(gateway: Gateway, number: int) -> Batch:
    """The batch the trainer gets. No trainer is here: the step is failed in its place, so the next comes."""
    folder = gateway.folder / "steps" / f"{number:06d}"
    wait_until(folder.exists)
    batch = read_batch(folder)
    write_json(folder / "failed.json", {"error": "seen"})
    wait_until(lambda: gateway.http.get(f"/slipway/steps/{number}").json()["state"] == "failed")
    return batch


def learned(batch: Batch) -> list[list[list[int]]]:
    """By sequence: its ids, those of each answer cut out."""
    found = []
    for row in range(batch.sequences):
        ids = batch.tokens[batch.span(row)].tolist()
        found.append([ids, *(ids[one["start"] : one["end"]] for one in batch.meta["samples"][row]["turns"])])
    return found


def sampled(gateway: Gateway, messages: list[dict[str, Any]]) -> tuple[str, list[int], list[int]]:
    """An answer that was served, the ids of its prompt, and its own."""
    answer = gateway.chat(messages=messages, max_tokens=48, temperature=0)
    choice = answer.json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    line = gateway.recorded()[-1]
    return choice["message"]["content"], line["prompts"][0], line["samples"][0]["completion_ids"]


def test_c53_an_example_is_learned_in_the_ids_that_serving_renders(gateway: Gateway) -> None:
    first, prompt, ids = sampled(gateway, [ASKED])
    conversation = [ASKED, answered(first), AGAIN]
    second, later_prompt, later_ids = sampled(gateway, conversation)
    number = step(gateway, "served", [*conversation, answered(second)], [ASKED, answered(first)])
    batch = given(gateway, number)
    assert learned(batch) == [[later_prompt + later_ids, ids, later_ids], [prompt + ids, ids]]
    assert ids[-1] == later_ids[-1] == END
    counts = batch.meta["counts"]
    assert (counts["samples"], counts["trained"], counts["turns_joined"]) == (3, 3, 1)
    assert counts["learned_tokens"] == 2 * len(ids) + len(later_ids) == int(batch.sampled.sum())


def test_an_answer_of_weight_0_is_shown_and_not_learned(gateway: Gateway) -> None:
    whole = [ASKED, answered("le chat noir", weight=0), AGAIN, answered("le chien blanc", weight=1)]
    batch = given(gateway, step(gateway, "weights", whole))
    ((ids, only),) = learned(batch)
    _, prompt, _ = sampled(gateway, [ASKED, answered("le chat noir"), AGAIN])
    assert ids == prompt + only
    assert batch.meta["counts"]["trained"] == 1


def test_c53_an_answer_that_the_template_shows_otherwise_is_dropped_and_counted(gateway: Gateway) -> None:
    good = [ASKED, answered("le chat noir")]
    number = step(
        gateway,
        "dropped",
        good,
        [ASKED, answered("")],
        [ASKED, answered("le chat<|im_end|> noir"), AGAIN, answered("le chien blanc")],
        [ASKED, answered("le chat noir " * 2000)],
        [ASKED, {"role": "assistant", "content": "le chat", "tool_calls": "none"}],
        [ASKED, answered("le chat noir", weight=0)],
        [ASKED, *[answered("le chat noir")] * 257],
    )
    batch = given(gateway, number)
    assert len(learned(batch)) == 1 and batch.meta["members"] == [{"example": 0, "group": 0}]
    counts = batch.meta["counts"]
    assert counts["dropped"] == {
        "the chat template changes it": 1,
        "what ends an answer stands inside it": 2,
        "longer than the context": 1,
        "the engine does not take its messages": 1,
        "no answer to learn": 1,
        "more than 256 answers": 257,
    }
    assert counts["trained"] + sum(counts["dropped"].values()) == counts["samples"] + 1


def test_c69_examples_of_which_none_can_be_learned_make_an_empty_step_and_say_why(gateway: Gateway) -> None:
    number = step(gateway, "none", [ASKED, answered("")])
    done = gateway.http.get(f"/slipway/steps/{number}?wait=30").json()
    assert (done["state"], done["version"]) == ("empty", None) and "1 the chat template changes it" in done[
        "error"
    ]
    body = {"key": "k", "examples": [{"messages": [ASKED, answered("x", weight=0)]}]}
    answer = gateway.http.post("/slipway/steps", json=body)
    assert answer.status_code == 422 and "1 no answer to learn" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("said", "param"), [({"loss": "grpo"}, "settings.loss"), ({"schedule": "cosine"}, "settings.schedule")]
)
def test_c60_settings_that_mean_nothing_are_refused_by_name(
    gateway: Gateway, said: dict[str, Any], param: str
) -> None:
    body = {"key": "k", "examples": [{"messages": [ASKED, answered("x")]}], "settings": said}
    answer = gateway.http.post("/slipway/steps", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def test_g18_a_step_of_examples_outlives_the_gateway_and_is_one_step_by_its_key(gateway: Gateway) -> None:
    said = {"learning_rate": 0.01}
    number = step(gateway, "again", [ASKED, answered("le chat noir")], settings=said)
    folder = gateway.folder / "steps" / f"{number:06d}"
    wait_until(folder.exists)
    before = read_batch(folder)
    gateway.kill()
    gateway.start()
    gateway.until_ready()
    assert step(gateway, "again", [ASKED, answered("le chat noir")], settings=said) == number
    after = given(gateway, number)
    assert learned(after) == learned(before) and after.meta["settings"] == said
