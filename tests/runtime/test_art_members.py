"""The choices of ART's trajectories that say no name: each is the sample of its question and its very words.

As release 0.4 sends them: of a stream its client keeps the text alone, so that samples whose ids differ in
what no text shows (a special token, half a letter at the end) are the same to it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from runtime.gateway.art.bodies import groups_of
from runtime.gateway.art.members import OTHERS, Members, members_of
from runtime.gateway.samples.samples import SampleStore
from runtime.gateway.steps.selection import select
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

    def members(self, *groups: Sequence[tuple[Said, float]], taken: Sequence[str] = ()) -> Members:
        listed = [
            {"trajectories": [trajectory(said, reward) for said, reward in group], "exceptions": []}
            for group in groups
        ]
        return members_of(groups_of({"trajectory_groups": listed}), self.store.of_content, taken.__contains__)


def trajectory(said: Said, reward: float) -> dict[str, Any]:
    question, text = said
    # Where nothing came, its client has None.
    kept = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text or None}}
    return {"messages_and_choices": [{"role": "user", "content": question}, kept], "reward": reward}


@pytest.mark.parametrize("seed", range(5))
def test_b08_of_odd_texts_in_several_groups_each_choice_is_its_own_words_with_its_own_reward(
    tmp_path: Path, seed: int
) -> None:
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
        groups = [[(one, float(draw.randrange(4))) for one in everything[start::4]] for start in range(4)]
        found = run.members(*groups)
        assert not found.dropped
        for group, sent in zip(found.groups, groups, strict=True):
            got = [(run.said[one], member.reward) for member in group.members for one in member.samples or ()]
            assert got == sent
        named = [one for group in found.groups for member in group.members for one in member.samples or ()]
        assert sorted(named) == sorted(run.said)
        counts = select(found.groups, store, taken=lambda _: False, lag=lambda _: 0, max_lag=2).counts
        assert counts.trained == len(everything) and not counts.dropped and counts.retokenised == 0


def test_b08_of_the_same_words_none_is_anothers_while_there_is_its_own(tmp_path: Path) -> None:
    run = Run(tmp_path)
    said = ("q", "x")
    older, own, greedy = run.sample(*said), run.sample(*said), run.sample(*said, temperature=0)
    run.sample(*said, x_slipway_purpose="eval")
    lost = run.sample(*said, delivered=False)
    blank = run.sample("q", "x\n")

    def found(*texts: str, taken: Sequence[str] = ()) -> list[str]:
        members = run.members([(("q", text), 1.0) for text in texts], taken=taken)
        return [one for group in members.groups for member in group.members for one in member.samples or ()]

    assert found("x", "x", "x\n") == [own, older, blank]
    assert found("x\n", "x") == [blank, own]
    # What cannot be trained on comes after what can; white space that no sample has is some client's own.
    assert found(*["x"] * 3) == [own, older, greedy]
    assert found("  x") == [blank]
    # A step's are not had again while there are others, and then said to be had.
    assert found("x", "x", taken=[own, older]) == [greedy, blank]
    assert found("x", taken=[own, older, greedy, blank]) == [own]
    assert lost not in found(*["x"] * 9) and len(found(*["x"] * 9)) == 4
    assert run.members([(("q", "never said"), 1.0), (("p", "x"), 1.0)]).dropped == {OTHERS: 2}
