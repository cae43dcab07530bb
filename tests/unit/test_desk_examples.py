"""What three examples are made of: puzzles, a mailbox, a judge by rules, and their rewards (B17).

That their programs run is seen in `tests/e2e/test_trained_by_desk.py`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion

from launcher.client import Trajectory, TrajectoryGroup, ruler_score_group
from runtime.tiny import grammar
from tests.unit.test_examples import load

CLUE, MAIL, SUMMARY = load("temporal_clue"), load("email_search"), load("summarise_ruler")
WORLDS = (CLUE.HOUSE, CLUE.MOONLIGHT)

# ------------------------------------------------------------------ Temporal Clue


def meaning(sentence: str, world: Any) -> Callable[[tuple[int, ...], tuple[int, ...]], bool]:
    """What a clue says, read from its words alone: of the place and the time of each guest."""
    who, where, when = (list(getattr(world, kind)) for kind in CLUE.KINDS)
    forms: list[tuple[str, Callable[..., bool]]] = [
        ("(?P<a>WHO) was not (?P<p>WHERE)", lambda w, t, a, p: w[a] != p),
        ("(?P<a>WHO) did not come (?P<t>WHEN)", lambda w, t, a, p: t[a] != p),
        ("Whoever was (?P<a>WHERE) came (?P<t>WHEN)", lambda w, t, a, p: t[w.index(a)] == p),
        ("Whoever was (?P<a>WHERE) came before (?P<b>WHO)", lambda w, t, a, p: t[w.index(a)] < t[p]),
        ("(?P<a>WHO) came before (?P<b>WHO)", lambda w, t, a, p: t[a] < t[p]),
    ]
    for form, says in forms:
        pattern = form
        for name, known in (("WHO", who), ("WHERE", where), ("WHEN", when)):
            pattern = pattern.replace(name, "|".join(map(re.escape, known)))
        if found := re.fullmatch(pattern + r"\.", sentence):
            one, other = ((who + where + when).index(it) for it in found.groups())
            of = lambda place: place % len(who)  # noqa: E731 - its number among its own kind
            return lambda w, t: says(w, t, of(one), of(other))
    raise AssertionError(f"nobody can read {sentence!r}")


@pytest.mark.process
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**9), world=st.sampled_from(WORLDS))
def test_b17_the_sentences_of_a_puzzle_allow_one_solution_and_each_of_them_is_needed(
    seed: int, world: Any
) -> None:
    puzzle = CLUE.make_puzzle(random.Random(seed), world, 3)
    read = [meaning(clue.text(world), world) for clue in puzzle.clues]
    every = list(itertools.product(itertools.permutations(range(len(world.who))), repeat=2))

    def left(clues: list[Any]) -> list[Any]:
        return [it for it in every if all(says(*it) for says in clues)]

    ((where, when),) = left(read)
    assert all(len(left([it for it in read if it is not one])) > 1 for one in read)
    for question in puzzle.questions:
        kind, number = question.about
        guest = {"who": number, "where": where.index(number) if kind == "where" else None,
                 "when": when.index(number) if kind == "when" else None}[kind]  # fmt: skip
        assert question.answer == {"who": guest, "where": where[guest], "when": when[guest]}[question.kind]
        assert world.name_of(kind, number) in question.text(world)


def test_b17_a_puzzle_is_the_same_for_its_seed_and_another_for_another() -> None:
    made = [CLUE.prompt(CLUE.make_puzzle(random.Random(seed), CLUE.HOUSE, 6)) for seed in (1, 1, 2)]
    assert made[0] == made[1] != made[2]
    assert all(word in made[0] for word in ("Ada", "kitchen", "at nine", "F. "))


def known_puzzle(world: Any) -> Any:
    questions = (
        CLUE.Question("who", ("where", 0), 1),
        CLUE.Question("where", ("who", 2), 2),
        CLUE.Question("when", ("who", 0), 1),
    )
    return CLUE.Puzzle(world, (), questions)


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("A. Boris\nB. cellar\nC. nine", 3),
        ("I think Ada was first.\n\n**A.** boris\n- B: In the Cellar.\n(C) at 9", 3),
        ("Answer A: Boris\nAnswer B: the attic\nAnswer C: nine o'clock", 2),
        ("A. Ada\nB. cellar\nC. ten\nNo, wait.\nA. Boris\nC. nine", 3),
        ("A. Ada or Boris\nB. cellar", 1),
        ("A. Boris", 1),
        ("Boris came to the cellar at nine.", 3),
        ("Adam, Clarabelle, nineteen", 0),
        ("", 0),
    ],
)
def test_b17_an_answer_is_read_however_it_is_decorated(text: str, right: int) -> None:
    assert CLUE.share_right(text, known_puzzle(CLUE.HOUSE)) == pytest.approx(right / 3)


@pytest.mark.parametrize("said", ["\n", " \n", "*\n", "A" + "." * 64, "A" + "." * 64 + "\n", "answer "])
def test_b17_what_a_policy_writes_without_end_is_read_in_time(said: str) -> None:
    """By what is tried alone: a pattern that tries all ways of cutting it takes hours."""
    assert CLUE.parse_answers(said * 4000, known_puzzle(CLUE.HOUSE)) == [None] * 3


@pytest.mark.process
def test_b17_of_the_tiny_models_french_the_first_of_each_kind_counts() -> None:
    puzzle = known_puzzle(CLUE.MOONLIGHT)
    assert CLUE.parse_answers("[[ ## french ## ]]\nla reine sur le pont sous la lune blanche", puzzle) == [
        1,
        2,
        1,
    ]
    assert CLUE.parse_answers("le roi et la reine noire", puzzle) == [0, None, 0]
    french = {word for it in grammar.phrases(20_000) for word in it.french.split()}
    for kind in CLUE.KINDS:
        for pattern in getattr(CLUE.MOONLIGHT, kind).values():
            assert any(word.startswith(pattern) for word in french)


def test_b17_without_letters_two_questions_of_a_kind_cannot_be_told_apart() -> None:
    questions = (CLUE.Question("who", ("where", 0), 1), CLUE.Question("who", ("where", 1), 0))
    assert CLUE.parse_answers("Boris and Ada", CLUE.Puzzle(CLUE.HOUSE, (), questions)) == [None, None]


# ------------------------------------------------------------------ the mailbox


def offices() -> list[Any]:
    return [
        MAIL.make_mailbox(3, 240, 72, MAIL.lost_property_facts),
        MAIL.make_mailbox(3, 600, 100, MAIL.office_facts),
    ]


def test_b17_a_mailbox_is_the_same_for_its_seed_and_has_the_mails_that_were_asked_for() -> None:
    dumped = [[list(box.database.execute("select * from mails")) for box in offices()] for _ in range(2)]
    assert dumped[0] == dumped[1]
    assert [len(box) for box in offices()] == [240, 600]
    other = MAIL.make_mailbox(4, 240, 72, MAIL.lost_property_facts)
    assert list(other.database.execute("select * from mails")) != dumped[0][0]


@pytest.mark.parametrize("place", [0, 1])
def test_b17_every_answer_stands_in_the_newest_mail_of_its_subject_and_is_found_by_it(place: int) -> None:
    box = offices()[place]
    assert len({it.question for it in box.facts}) == len(box.facts)
    assert any(it.earlier for it in box.facts) == bool(place), "an office corrects itself"
    for fact in box.facts:
        found = json.loads(box.search_inbox(fact.subject.split()))
        same = [it for it in found if it["subject"] == fact.subject]
        assert [it["id"] for it in same] == sorted((it["id"] for it in same), reverse=True)
        body = json.loads(box.read_email(same[0]["id"]))["body"]
        assert body == fact.body.format(answer=fact.answer)
        if fact.earlier:
            assert fact.earlier in json.loads(box.read_email(same[1]["id"]))["body"]
            assert same[1]["sent"] < same[0]["sent"]


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("search_inbox", '{"keywords": []}', "error: no keywords"),
        ("search_inbox", '{"keywords": "nora soup"}', "Lunch"),
        ("search_inbox", '{"keywords": ["%", "nowhere"]}', "[]"),
        ("search_inbox", '{"keywords": ["\' or 1=1 --"]}', "[]"),
        ("search_inbox", "{}", "error: KeyError"),
        ("search_inbox", "[1]", "error: TypeError"),
        ("read_email", '{"id": 99999}', "error: no mail has the id 99999"),
        ("read_email", '{"id": "1"}', "subject"),
        ("read_email", "not JSON", "error: JSONDecodeError"),
        ("delete_everything", "{}", "error: there is no tool delete_everything"),
    ],
)
def test_b17_a_tool_answers_whatever_it_is_given(name: str, arguments: str, says: str) -> None:
    text, final = MAIL.call_tool(offices()[1], name, arguments)
    assert says in text and final is None


def fact(answer: str = "B-214") -> Any:
    return MAIL.Fact("Fire drill", "It is in {answer}.", "Where?", answer, "")


def test_b17_rewards_are_ordered_right_early_before_late_before_text_before_nothing() -> None:
    reward = MAIL.reward_of
    early, late = (reward(fact(), " b-214. ", True, turns, 10) for turns in (2, 10))
    as_text = reward(fact(), "B-214", False, 1, 10)
    wrong = reward(fact(), "B-215", True, 2, 10)
    nothing = reward(fact(), None, False, 10, 10)
    assert early > late == 1.0 > as_text > wrong > nothing == reward(fact(), "no idea", False, 1, 10)
    assert early == pytest.approx(1.08) and as_text == pytest.approx(0.4)
    in_disorder, wrong_form, said = (
        reward(fact("la clé verte"), text, False, 1, 3)
        for text in ("la verte clé", "la clé vert", "la clé verte")
    )
    assert nothing < in_disorder == wrong_form < said == as_text


class Player:
    """A model that says what it is told to say, turn by turn; it keeps what it was asked."""

    def __init__(self, *turns: dict[str, Any]) -> None:
        self.chat = self.completions = self
        self.turns, self.asked = [*turns], []

    async def create(self, **asked: Any) -> ChatCompletion:
        self.asked.append(asked)
        message = {"role": "assistant", "content": None, **self.turns.pop(0)}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        return ChatCompletion.model_validate(
            {"id": "1", "object": "chat.completion", "created": 0, "model": "played", "choices": [choice]}
        )


def calls(*made: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        "tool_calls": [
            {
                "id": f"c{number}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(given)},
            }
            for number, (name, given) in enumerate(made)
        ]
    }


def played(player: Player, turns: int = 4) -> Trajectory:
    box = offices()[1]
    return asyncio.run(
        MAIL.rollout(
            player, "policy", box, box.facts[0], MAIL.prompt_messages(box.facts[0], turns, False), turns, 64
        )
    )


def test_b17_an_agent_searches_reads_and_answers_and_every_turn_is_in_its_trajectory() -> None:
    box = offices()[1]
    known = box.facts[0]
    newest = json.loads(box.search_inbox(known.subject.split()))[0]["id"]
    player = Player(
        calls(("search_inbox", {"keywords": known.subject.split()}), ("read_email", {"id": newest})),
        calls(("return_final_answer", {"answer": known.answer})),
    )
    made = played(player)
    assert made.reward == pytest.approx(1.05)
    assert made.metrics["turns"] == 2 and made.metrics["right"]
    roles = [it["role"] for it in made.messages()]
    assert roles == ["system", "user", "assistant", "tool", "tool", "assistant", "tool"]
    sent = player.asked[1]["messages"]
    assert [it.get("tool_call_id") for it in sent[3:]] == ["c0", "c1"]
    assert known.answer in sent[4]["content"]
    assert {it["function"]["name"] for it in player.asked[0]["tools"]} == {
        "search_inbox", "read_email", "return_final_answer",
    }  # fmt: skip
    assert made.tools == MAIL.TOOLS


def test_b17_an_agent_that_only_searches_is_ended_and_one_that_talks_ends_itself() -> None:
    search = calls(("search_inbox", {"keywords": ["nora"]}))
    assert played(Player(*[search] * 4)).reward == MAIL.NO_CALL_REWARD
    talks = Player({"content": "It is surely somewhere."})
    assert played(talks).reward == pytest.approx(MAIL.NO_CALL_REWARD) and len(talks.asked) == 1


@pytest.mark.process
def test_b17_what_was_lost_is_of_words_that_the_tiny_model_knows_in_their_right_form() -> None:
    right = {it.english: it.french for it in grammar.phrases(60_000)}
    facts = offices()[0].facts
    known = [it for it in facts if it.question in right]
    assert len(facts) == 72 and len(known) > 20
    assert all(right[it.question] == it.answer for it in known)


# ------------------------------------------------------------------ the summariser


def summaries(document: str, *texts: str) -> TrajectoryGroup:
    asked = SUMMARY.prompt_messages(document, True)
    return TrajectoryGroup(
        [Trajectory(messages_and_choices=[*asked, {"role": "assistant", "content": text}]) for text in texts]
    )


@pytest.mark.process  # imports DSPy
def test_b17_the_judge_by_rules_prefers_what_keeps_the_nouns_and_leaves_the_rest_out() -> None:
    head = "[[ ## french ## ]]\n"
    group = summaries(
        "the black cat under the cold house",
        f"{head}le chat sous la maison\n\n[[ ## completed ## ]]",
        f"{head}le chat noir sous la maison froide\n\n[[ ## completed ## ]]",
        f"{head}le chat\n\n[[ ## completed ## ]]",
        "nothing of the kind",
    )
    judged = asyncio.run(ruler_score_group(group, (SUMMARY.LocalJudge(), "rules"), rubric=SUMMARY.RUBRIC))
    assert [one.reward for one in judged] == pytest.approx([1.0, 5 / 7, 0.5, 0.0])


@pytest.mark.process
def test_b17_the_documents_are_of_words_that_the_tiny_model_knows() -> None:
    known = {word for it in grammar.phrases(20_000) for word in f"{it.english} {it.french}".split()}
    phrases = SUMMARY.phrases(400)
    assert len(set(phrases)) == 400 and phrases == SUMMARY.phrases(400)
    assert {word for it in phrases for word in it.split()} | {*SUMMARY.NOUNS.values()} <= known


def test_b17_a_judge_of_openai_has_an_address_and_a_key_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:7453/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "of-the-run")
    monkeypatch.delenv("JUDGE_API_KEY", raising=False)
    with pytest.raises(SystemExit, match="JUDGE_API_KEY"):
        SUMMARY.make_judge(None, False)
    monkeypatch.setenv("JUDGE_API_KEY", "of-the-user")
    name, more = SUMMARY.make_judge(None, False)
    assert name.startswith("openai/")
    assert more == {"api_base": "https://api.openai.com/v1", "api_key": "of-the-user"}
    assert SUMMARY.make_judge("base", True) == ("base", None)
