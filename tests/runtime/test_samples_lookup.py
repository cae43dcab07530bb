"""Answers that say no name: each is the sample of its question and its very words.

Their client keeps the text alone, so that samples whose ids differ in what no text shows (a special token,
half a letter at the end) are the same to it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from runtime.gateway.samples.lookup import lookup_routes
from runtime.gateway.samples.samples import SampleStore
from runtime.gateway.steps.selection import select
from runtime.shared.schema import Group, Member
from tests.runtime.recorded import answer, asked, choice, record

# Each is said in more than one group, and more than once in each.
ODD = (
    "", " ", "\n", "x", " x", "x\n", "x\n\n", "x ", "X", "x\u00a0", "x\u200b", "x\ufffd", "\ufffdx", "\ufffd",
    "e\u0301", "\u00e9", "<|im_start|>x", "x<|im_end|>", "***", "None", "[]", "a\x00b", "a\u2028b",
    "\U0001f600", '{"content": "x"}', "x\r\n", "\ufeffx",
)  # fmt: skip
Said = tuple[str, str]


class Run:
    """What was sampled: a question and a text for each sample."""

    def __init__(self, folder: Path) -> None:
        self.store = SampleStore(folder)
        self.said: dict[str, Said] = {}

    def sample(
        self, question: str, text: str, ids: Sequence[int] = (3,), delivered: bool = True, **fields: Any
    ) -> str:
        request = asked(messages=[{"role": "user", "content": question}], **fields)
        one = choice([*ids], [-0.5] * len(ids), text)
        (name,) = record(self.store, request, answer([1, 2], one), delivered=delivered)
        self.said[name] = question, text
        return name

    def found(self, said: Sequence[Said], taken: Sequence[str] = (), named: Sequence[str] = ()) -> list[Any]:
        """The sample of each question and answer, by the route."""
        app = FastAPI()
        app.include_router(lookup_routes(self.store.of_content, taken.__contains__))
        body = {"conversations": [*map(conversation, said)], "named": [*named]}
        answer = TestClient(app).post("/slipway/samples/lookup", json=body)
        assert answer.status_code == 200, answer.text
        return [sample for (sample,) in answer.json()["samples"]]


def conversation(said: Said) -> dict[str, Any]:
    question, text = said
    # Where nothing came, its client has None.
    kept = {"role": "assistant", "content": text or None, "tool_calls": None}
    return {"messages": [{"role": "user", "content": question}, kept], "answers": [1]}


@pytest.mark.parametrize("seed", range(5))
def test_b08_of_odd_texts_each_answer_is_its_own_words(tmp_path: Path, seed: int) -> None:
    run, draw = Run(tmp_path), random.Random(seed)
    everything = [
        (question, text)
        for question in ("q", "q ", "another")
        for text in ODD
        for _ in range(draw.choice((1, 3)))
    ]
    draw.shuffle(everything)
    for place, (question, text) in enumerate(everything):
        # The same words of other ids: a special token in them is not in the text.
        run.sample(question, text, ids=[3, 1, 4 + place % 2][place % 3 :])
    for store in (run.store, SampleStore(tmp_path)):
        run.store = store  # the second has it from the disk
        draw.shuffle(everything)
        names = run.found(everything)
        assert [run.said[name] for name in names] == everything
        assert sorted(names) == sorted(run.said)
        members = [Member(samples=[name], reward=float(draw.randrange(4))) for name in names]
        groups = [Group(id=str(start), members=members[start::4]) for start in range(4)]
        counts = select(
            groups, store, taken=lambda _: False, staleness_of=lambda _: 0, max_staleness=2
        ).counts
        assert counts.trained == len(everything) and not counts.dropped and counts.retokenised == 0


def test_b08_of_the_same_words_none_is_anothers_while_there_is_its_own(tmp_path: Path) -> None:
    run = Run(tmp_path)
    said = ("q", "x")
    older, own, greedy = run.sample(*said), run.sample(*said), run.sample(*said, temperature=0)
    run.sample(*said, x_slipway_purpose="eval")
    lost = run.sample(*said, delivered=False)
    blank = run.sample("q", "x\n")

    def found(*texts: str, **how: Sequence[str]) -> list[str]:
        return [name for name in run.found([("q", text) for text in texts], **how) if name is not None]

    assert found("x", "x", "x\n") == [own, older, blank]
    assert found("x\n", "x") == [blank, own]
    # What cannot be trained on comes after what can; white space that no sample has is some client's own.
    assert found(*["x"] * 3) == [own, older, greedy]
    assert found("  x") == [blank]
    # A step's are not had again while there are others, and then said to be had.
    assert found("x", "x", taken=[own, older]) == [greedy, blank]
    assert found("x", taken=[own, older, greedy, blank]) == [own]
    assert lost not in found(*["x"] * 9) and len(found(*["x"] * 9)) == 4
    assert found("x", named=[own]) == [older], "what another answer of the step names is not had again"
    assert run.found([("q", "never said"), ("p", "x")]) == [None, None]


@pytest.mark.parametrize(
    "conversation",
    [
        {"messages": [], "answers": []},
        {"messages": [{"role": "user"}], "answers": [1]},
        {"messages": [{"role": "user"}], "answers": [-1]},
        {"messages": ["words"], "answers": [0]},
        {"messages": [{"role": "user"}], "answers": [0] * 5000},
    ],
)
def test_b08_what_is_no_conversation_is_refused(tmp_path: Path, conversation: dict[str, Any]) -> None:
    app = FastAPI()
    app.include_router(lookup_routes(SampleStore(tmp_path).of_content, lambda _: False))
    answer = TestClient(app).post("/slipway/samples/lookup", json={"conversations": [conversation]})
    assert answer.status_code == 422  # a gateway words it as a 400
