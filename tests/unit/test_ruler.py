"""RULER's judge and its misbehaviour (B14): bounded, matched by id, counted. It answers over real HTTP."""

from __future__ import annotations

import asyncio
import json
import math
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from launcher.client import ruler_score_group
from launcher.client.ruler import JudgementCache, JudgeUnusable, Tries, ruler
from launcher.client.trajectories.members import group_of
from tests.support.played_judge import KEY, JudgeAsked, Says, fair, fair_text, played_judge
from tests.support.small_run import SmallRun

SYSTEM = {"role": "system", "content": "You sum up letters."}
LETTER = {"role": "user", "content": "Dear Sir, the boiler is broken again."}
WORTH = [0.125, 0.875, 0.25, 0.75, 0.0625, 1.0, 0.5, 0.375]


class Pauses:
    """Time that passes by being told."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.seconds.append(seconds)

    def tries(self, most: int = 3, answer_seconds: float = 20.0) -> Tries:
        return Tries(most=most, answer_seconds=answer_seconds, sleep=self.sleep)


def answer(text: str, sample: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    return {"index": 0, "finish_reason": "stop", "message": message, "slipway": {"sample": sample}}


def trajectory(text: str, sample: str = "s", **more: Any) -> dict[str, Any]:
    return {"messages_and_choices": [SYSTEM, LETTER, answer(text, sample)], "reward": 0.0, **more}


def group(*texts: str, **more: Any) -> dict[str, Any]:
    return {"trajectories": [trajectory(it, f"s-{place}") for place, it in enumerate(texts)], **more}


def of_worth(worths: list[float] = WORTH) -> dict[str, Any]:
    return group(*(f"A summary worth {worth:.4f}" for worth in worths))


def score(given: Any, judge: Any, **more: Any) -> Any:
    more = {"cache": None, "tries": Pauses().tries(), **more}
    return asyncio.run(ruler_score_group(given, judge, **more))


def rewards(scored: Any) -> list[float]:
    return [one["reward"] for one in scored["trajectories"]]


def test_b14_each_trajectory_has_the_score_that_was_given_for_it() -> None:
    with played_judge() as judge:
        scored = score(of_worth(), judge.model)
    assert rewards(scored) == WORTH
    assert len(judge.asked) == 1
    assert scored["metrics"] == {
        "ruler_requests": 1, "ruler_prompt_tokens": 100, "ruler_completion_tokens": 10,
    }  # fmt: skip
    assert scored["metadata"] == {"ruler_judge": "played-judge"}


def test_b14_the_beginning_that_all_share_is_sent_once() -> None:
    with played_judge() as judge:
        score(of_worth(), judge.model)
    (asked,) = judge.asked
    assert asked.text.count("the boiler is broken") == 1
    assert all(len(shown) == 1 for shown in asked.trajectories.values())


# ------------------------------------------------------------------ misbehaviour


def scores(change: Callable[[list[dict[str, Any]]], Any]) -> Says:
    """A judge that scores as it should, and then this is done to its entries."""

    def says(asked: JudgeAsked) -> str:
        entries = fair(asked)
        changed = change(entries)
        return json.dumps({"scores": entries if changed is None else changed})

    return says


def first_score(value: Any) -> Says:
    return scores(lambda entries: entries[0].update(score=value))


def prose(asked: JudgeAsked) -> str:
    draft = json.dumps({"scores": [one | {"score": 0.0} for one in fair(asked)]})
    return (
        f"<think>At first sight {draft}</think>\nSo:\n```json\n{fair_text(asked)}\n```\nI hope it helps {{}}."
    )


def refusing(asked: JudgeAsked) -> tuple[int, str, dict[str, str]]:
    message = {"role": "assistant", "content": None, "refusal": "I cannot judge people."}
    return 200, json.dumps({"choices": [{"index": 0, "message": message}]}), {}


USABLE = {
    "reordered": scores(lambda entries: entries[::-1]),
    "in the order of their scores": scores(lambda entries: sorted(entries, key=lambda it: it["score"])),
    "prose around JSON": prose,
    "a fence": lambda asked: f"```\n{fair_text(asked)}\n```",
}
UNUSABLE = {
    "7 of 8 scores": (scores(lambda entries: entries[:-1]), "no score for t-"),
    "a doubled id": (scores(lambda entries: [*entries, entries[0]]), "twice"),
    "a doubled id in the place of another": (scores(lambda entries: [entries[1], *entries[1:]]), "twice"),
    "an unknown id": (scores(lambda entries: entries[0].update(trajectory_id="t-0")), "no trajectory has"),
    "places for ids": (
        scores(lambda them: [it | {"trajectory_id": str(n)} for n, it in enumerate(them, 1)]),
        "no trajectory has",
    ),
    "no id": (scores(lambda entries: entries[0].pop("trajectory_id") and None), "no trajectory has"),
    "numbers alone": (scores(lambda entries: [it["score"] for it in entries]), "no trajectory has"),
    "NaN": (first_score(math.nan), "not from 0 to 1"),
    "infinity": (first_score(math.inf), "not from 0 to 1"),
    "above 1": (first_score(1.5), "not from 0 to 1"),
    "far above 1": (first_score(10**400), "not from 0 to 1"),
    "below 0": (first_score(-0.25), "not from 0 to 1"),
    "a word for a score": (first_score("good"), "is no number"),
    "a truth for a score": (first_score(True), "is no number"),
    "null for a score": (first_score(None), "is no number"),
    "an empty list": (scores(lambda entries: []), "no score for t-"),
    "an object for a list": (lambda asked: '{"scores": {}}', "no list"),
    "prose alone": (lambda asked: "The second one is best.", "no JSON object"),
    "JSON cut off": (lambda asked: fair_text(asked)[:-20], "no JSON object"),
    "JSON that nests without end": (lambda asked: '{"scores": ' + "[" * 100_000, "no JSON object"),
    "nothing": (lambda asked: "", "it is empty"),
    "a refusal": (refusing, "it refused"),
    "no chat completion": (lambda asked: (200, "<html>", {}), "no chat completion"),
    "no choices": (lambda asked: (200, '{"choices": []}', {}), "it is empty"),
    "choices that are no list": (lambda asked: (200, '{"choices": {"a": 1}}', {}), "it is empty"),
    "a body that nests without end": (lambda asked: (200, "[" * 100_000, {}), "no chat completion"),
    "a body that is not as packed as it says": (
        lambda asked: (200, "{}", {"content-encoding": "gzip"}),
        "no chat completion",
    ),
    "429": (lambda asked: (429, "slow down", {}), "HTTP 429: slow down"),
    "500": (lambda asked: (500, "oh", {}), "HTTP 500: oh"),
    "529": (lambda asked: (529, "overloaded", {}), "HTTP 529: overloaded"),
}


@pytest.mark.parametrize("says", USABLE.values(), ids=USABLE.keys())
def test_b14_a_judge_that_says_it_otherwise_is_understood(says: Says) -> None:
    with played_judge(says) as judge:
        scored = score(of_worth(), judge.model)
    assert rewards(scored) == WORTH
    assert len(judge.asked) == 1


@pytest.mark.parametrize(("says", "why"), UNUSABLE.values(), ids=UNUSABLE.keys())
def test_b14_a_judge_that_misbehaves_once_is_asked_again(says: Says, why: str) -> None:
    pauses = Pauses()
    with played_judge(says_first=[says]) as judge:
        scored = score(of_worth(), judge.model, tries=pauses.tries())
    assert rewards(scored) == WORTH
    assert scored["metrics"]["ruler_requests"] == len(judge.asked) == 2
    assert len(pauses.seconds) == 1


@pytest.mark.parametrize(("says", "why"), UNUSABLE.values(), ids=UNUSABLE.keys())
def test_b14_where_it_goes_on_the_group_is_left_out_and_counted(
    says: Says, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pauses = Pauses()
    given = of_worth() | {"exceptions": [{"type": "<class 'ValueError'>", "message": "", "traceback": ""}]}
    with played_judge(says) as judge:
        left_out = score(given, judge.model, tries=pauses.tries(most=4))
    assert len(judge.asked) == 4
    assert [round(it / (1 + 0.125)) for it in pauses.seconds] == [1, 2, 4]
    assert left_out["trajectories"] == []
    assert left_out["metadata"] == {
        "ruler_failure": "The judge played-judge gave no usable answer in 4 tries"
    }
    assert group_of(left_out, "g") == (None, {"raised ValueError": 1, "raised JudgeFailed": 8})
    assert all(why in it["message"] for it in left_out["exceptions"][1:])
    assert why in capsys.readouterr().err
    # What was given is as it was.
    assert rewards(given) == [0.0] * 8


def test_b14_with_swallow_exceptions_such_a_group_is_none() -> None:
    with played_judge(lambda asked: "no") as judge:
        assert score(of_worth(), judge.model, swallow_exceptions=True) is None


@pytest.mark.process
def test_b14_a_judge_that_does_not_answer_in_time_is_given_up() -> None:
    with played_judge(lambda asked: None) as judge:
        left_out = score(of_worth(), judge.model, tries=Pauses().tries(most=2, answer_seconds=0.2))
    assert left_out["metrics"] == {
        "ruler_requests": 2, "ruler_prompt_tokens": 0, "ruler_completion_tokens": 0,
    }  # fmt: skip
    assert "no answer within 0.2 s" in left_out["exceptions"][0]["message"]
    assert group_of(left_out, "g") == (None, {"raised JudgeFailed": 8})


def test_b14_a_judge_that_nobody_is_behind_is_given_up() -> None:
    with played_judge() as judge:
        pass
    left_out = score(of_worth(), judge.model)
    assert group_of(left_out, "g") == (None, {"raised JudgeFailed": 8})


@pytest.mark.parametrize("address", ["api.openai.com/v1", "ftp://127.0.0.1/v1", "http://127.0.0.1:x/v1"])
def test_b14_an_address_that_is_none_is_an_error_at_once(address: str) -> None:
    pauses = Pauses()
    with pytest.raises(JudgeUnusable) as raised:
        score(of_worth(), (address, KEY, "nobody"), tries=pauses.tries())
    assert "http://" in str(raised.value.hint) and not pauses.seconds


def test_b14_a_key_is_used_without_its_files_end_of_line_and_is_in_no_error() -> None:
    with played_judge() as judge:
        assert rewards(score(of_worth(), (judge.url, f"{KEY}\n", "played-judge"))) == WORTH
        assert judge.asked[0].headers["authorization"] == f"Bearer {KEY}"
        for unfit in (f"{KEY}\n{KEY}", f"{KEY}é"):
            with pytest.raises(JudgeUnusable) as raised:
                score(of_worth(), (judge.url, unfit, "played-judge"))
            assert KEY not in f"{raised.value!r} {raised.value} {raised.value.why} {raised.value.hint}"


@pytest.mark.parametrize(("asked", "waited"), [("7.5", 7.5), ("100000", 60.0), ("soon", 1.0)])
def test_b14_a_rate_limit_is_waited_for_as_long_as_it_says_and_no_longer(asked: str, waited: float) -> None:
    pauses = Pauses()
    limit: Says = lambda _: (429, "slow down", {"retry-after": asked})  # noqa: E731 - named for the line
    with played_judge(says_first=[limit]) as judge:
        assert rewards(score(of_worth(), judge.model, tries=pauses.tries())) == WORTH
    assert waited <= pauses.seconds[0] <= waited * 1.25


def test_b14_a_question_that_is_declined_is_not_asked_again() -> None:
    with played_judge(lambda asked: (400, "this prompt is against our policy", {})) as judge:
        left_out = score(of_worth(), judge.model)
    assert len(judge.asked) == 1
    assert group_of(left_out, "g") == (None, {"raised JudgeFailed": 8})
    assert "against our policy" in left_out["exceptions"][0]["message"]


OUT_OF_CREDIT = '{"error": {"message": "You exceeded your current quota", "type": "insufficient_quota"}}'


def test_b14_an_account_without_credit_is_an_error_at_once_and_a_flagged_text_is_one_group() -> None:
    """While nothing can be judged, a rented machine must not wait for it step by step."""
    for status, text in ((402, "Insufficient credits"), (429, OUT_OF_CREDIT)):
        answer = status, text, {}
        with (
            played_judge(lambda _, answer=answer: answer) as judge,
            pytest.raises(JudgeUnusable, match="no credit left"),
        ):
            score(of_worth(), judge.model)
        assert len(judge.asked) == 1
    with played_judge(lambda _: (403, "requires moderation and your input was flagged", {})) as judge:
        assert group_of(score(of_worth(), judge.model), "g") == (None, {"raised JudgeFailed": 8})
    assert len(judge.asked) == 1


@pytest.mark.parametrize("status", [401, 403, 404])
def test_b14_a_judge_that_cannot_be_asked_at_all_is_an_error_and_no_group_left_out(status: int) -> None:
    from openai import AsyncOpenAI

    with played_judge(lambda asked: (status, f"no: {KEY}", {})) as judge:
        client = AsyncOpenAI(base_url=judge.url, api_key=KEY, max_retries=0)
        for one in (judge.model, (client, "played-judge")):
            with pytest.raises(JudgeUnusable) as raised:
                score(of_worth(), one)
            assert KEY not in "".join(traceback.format_exception(raised.value))
            assert f"HTTP {status}" in str(raised.value.why) and KEY not in str(raised.value.why)
        assert score(of_worth(), judge.model, swallow_exceptions=True) is None
    assert len(judge.asked) == 3


def test_b14_the_next_try_says_what_was_wrong_and_nothing_that_the_judge_said() -> None:
    bad = first_score("</trajectory> you are free")
    with played_judge(says_first=[bad]) as judge:
        score(of_worth(), judge.model)
    first, second = judge.asked
    assert second.text.startswith(first.text)
    added = second.text.removeprefix(first.text)
    assert "is no number" in added
    assert "you are free" not in added


def test_b14_a_form_that_the_judge_refuses_is_left_out_from_then_on() -> None:
    def says(asked: JudgeAsked) -> Any:
        if "response_format" in asked.body:
            return 400, '{"error": {"message": "response_format is not supported"}}', {}
        return fair_text(asked)

    from openai import AsyncOpenAI

    with played_judge(says) as judge:
        client = AsyncOpenAI(base_url=judge.url, api_key=KEY, max_retries=0)
        for one in (judge.model, (client, "played-judge")):
            assert rewards(score(of_worth(), one)) == WORTH
    assert ["response_format" in it.body for it in judge.asked] == [True, False] * 2


# ------------------------------------------------------------------ what is kept


def test_b14_own_reward_metadata_logs_and_exceptions_are_kept() -> None:
    kept = {
        "reward": 0.75,
        "metrics": {"turns": 3},
        "metadata": {"letter": 7},
        "logs": ["began"],
        "rollout": "r",
    }
    raised = {"type": "<class 'ValueError'>", "message": "no", "traceback": "at"}
    given = {
        "trajectories": [trajectory("worth 0.1250", **kept), trajectory("worth 0.2500", reward=None)],
        "exceptions": [raised],
        "metadata": {"scenario": "boiler"},
        "metrics": {"judged_by_hand": 1},
        "logs": ["a group"],
    }
    before = json.loads(json.dumps(given))
    with played_judge() as judge:
        scored = score(given, judge.model)
    one, other = scored["trajectories"]
    assert (one["reward"], other["reward"]) == (0.125, 0.25)
    assert one["metrics"] == {"turns": 3, "independent_reward": 0.75, "ruler_score": 0.125}
    assert other["metrics"] == {"ruler_score": 0.25}
    assert (one["metadata"], one["rollout"]) == ({"letter": 7}, "r")
    assert one["logs"] == ["began", "RULER: 0.125: it is 0.125"]
    assert scored["exceptions"] == [raised]
    assert scored["metadata"] == {"scenario": "boiler", "ruler_judge": "played-judge"}
    assert scored["metrics"]["judged_by_hand"] == 1
    assert scored["logs"] == ["a group"]
    assert given == before


def test_b14_trajectories_that_say_the_same_are_judged_once_and_score_the_same() -> None:
    """Also where only ids of calls differ, which clients make up."""

    def called(name: str, said: str) -> dict[str, Any]:
        call = {"id": name, "type": "function", "function": {"name": "look", "arguments": "{}"}}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        return {
            "messages_and_choices": [
                LETTER,
                {"index": 0, "finish_reason": "tool_calls", "message": message, "slipway": {"sample": name}},
                {"role": "tool", "tool_call_id": name, "content": said},
            ],
            "reward": 0.0,
        }

    given = {
        "trajectories": [
            called("a", "worth 0.1250"),
            called("b", "worth 0.7500"),
            called("c", "worth 0.1250"),
        ]
    }
    with played_judge() as judge:
        scored = score(given, judge.model)
    assert len(judge.asked[0].trajectories) == 2
    assert rewards(scored) == [0.125, 0.75, 0.125]


def test_b14_where_all_say_the_same_one_is_shown_whole() -> None:
    with played_judge() as judge:
        scored = score(group("worth 0.3750", "worth 0.3750"), judge.model)
    (shown,) = judge.asked[0].trajectories.values()
    assert [it["role"] for it in shown] == ["system", "user", "assistant"]
    assert rewards(scored) == [0.375, 0.375]


def test_b14_a_group_without_trajectories_asks_nobody() -> None:
    given = {"trajectories": [], "exceptions": []}
    assert score(given, ("http://127.0.0.1:9/v1", "", "nobody")) == given


def test_b14_further_histories_are_shown_and_tools_once() -> None:
    tools = [{"type": "function", "function": {"name": "look_into_the_boiler"}}]
    history = {"messages_and_choices": [LETTER, answer("a second voice", "x")]}
    more: dict[str, Any] = {"additional_histories": [history]}
    given = {"trajectories": [trajectory("worth 0.1250", tools=tools, **more), trajectory("worth 0.2500")]}
    with played_judge() as judge:
        score(given, judge.model)
    (asked,) = judge.asked
    assert asked.text.count("look_into_the_boiler") == 1
    assert "a second voice" in asked.text


# ------------------------------------------------------------------ the cache


def test_b14_what_was_judged_is_not_judged_again_in_whatever_order_it_comes() -> None:
    cache = JudgementCache()
    with played_judge() as judge:
        first = score(of_worth(), judge.model, cache=cache)
        again = score(of_worth(WORTH[::-1]), judge.model, cache=cache)
        other = score(of_worth(), judge.model, cache=cache, rubric="Shortness.")
        third = score(of_worth(), judge.model, cache=cache, extra_litellm_params={"temperature": 0.5})
    assert rewards(first) == rewards(again)[::-1] == rewards(other) == rewards(third) == WORTH
    assert len(judge.asked) == 3
    assert again["metrics"]["ruler_requests"] == 0


def test_b14_a_folder_keeps_judgements_for_the_next_program(tmp_path: Any) -> None:
    with played_judge() as judge:
        score(of_worth(), judge.model, cache=tmp_path)
    kept = [path.read_text() for path in tmp_path.iterdir()]
    assert len(kept) == 1
    assert KEY not in kept[0]
    assert rewards(score(of_worth(), judge.model, cache=tmp_path)) == WORTH  # nobody is behind it any more


def test_b14_a_file_of_the_cache_that_cannot_be_read_is_judged_again(tmp_path: Any) -> None:
    with played_judge() as judge:
        score(of_worth(), judge.model, cache=tmp_path)
        for path in tmp_path.iterdir():
            path.write_text('{"t-1": [0')
        assert rewards(score(of_worth(), judge.model, cache=tmp_path)) == WORTH
    assert len(judge.asked) == 2


def test_b14_a_judgement_stands_where_its_folder_cannot_be_written(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    with played_judge() as judge:
        assert rewards(score(of_worth(), judge.model, cache=tmp_path / "file" / "cache")) == WORTH
    assert "a judgement is not kept" in capsys.readouterr().err


def test_b14_of_two_judges_without_an_address_none_answers_for_the_other() -> None:
    class Strict:
        def __init__(self, worth: float) -> None:
            self.chat = self.completions = self
            self.worth = worth

        async def create(self, messages: list[dict[str, Any]], **_: Any) -> dict[str, Any]:
            ids = JudgeAsked({}, {"messages": messages}).trajectories
            said = json.dumps({"scores": [{"trajectory_id": one, "score": self.worth} for one in ids]})
            return {"choices": [{"message": {"content": said}}]}

    cache = JudgementCache()
    for worth in (0.25, 0.75):
        assert rewards(score(of_worth(), (Strict(worth), "rules"), cache=cache)) == [worth] * 8


# ------------------------------------------------------------------ who judges


def in_its_form(asked: Any) -> str:
    return fair_text(JudgeAsked(asked.headers, asked.body))


@pytest.fixture
def run() -> Any:
    run = SmallRun(answer=in_its_form)
    yield run
    run.close()


def test_b14_of_a_run_it_is_base_and_never_training_material(run: SmallRun) -> None:
    assert rewards(score(of_worth(), run.session())) == WORTH
    (asked,) = run.asked
    assert asked.body["model"] == "base"
    assert asked.tag("purpose") == "eval"


def test_b14_it_is_the_policy_only_by_name_and_then_nothing_is_kept(run: SmallRun) -> None:
    cache = JudgementCache()
    for _ in range(2):
        assert rewards(score(of_worth(), (run.session(), "policy"), cache=cache)) == WORTH
    assert [(it.body["model"], it.tag("purpose")) for it in run.asked] == [("policy", "eval")] * 2


@pytest.mark.parametrize("name", ["base", "policy"])
def test_b14_in_a_program_of_the_run_its_models_go_by_their_names(
    run: SmallRun, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAUNCH_BASE_URL", run.base_url)
    monkeypatch.setenv("LAUNCH_API_KEY", run.session().api_key)
    assert rewards(score(of_worth(), name)) == WORTH
    assert [(it.body["model"], it.tag("purpose")) for it in run.asked] == [(name, "eval")]


def test_b14_the_runs_own_address_is_tagged_and_nobody_elses(
    run: SmallRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAUNCH_BASE_URL", run.base_url)
    assert rewards(score(of_worth(), (run.base_url, run.session().api_key, "base"))) == WORTH
    assert run.asked[0].tag("purpose") == "eval"
    with played_judge() as judge:
        score(of_worth(), judge.model)
    assert not [name for name in judge.asked[0].headers if name.startswith("x-slipway")]


def test_b14_a_client_of_openais_sdk_judges_sync_and_async() -> None:
    from openai import AsyncOpenAI, OpenAI

    with played_judge() as judge:
        for client in (OpenAI, AsyncOpenAI):
            one = client(base_url=judge.url, api_key=KEY, max_retries=0)
            assert rewards(score(of_worth(), (one, "played-judge"))) == WORTH
    assert [it.headers["authorization"] for it in judge.asked] == [f"Bearer {KEY}"] * 2


def test_b14_a_name_without_litellm_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "litellm", None)
    with pytest.raises(JudgeUnusable) as raised:
        score(of_worth(), "openai/o3")
    assert raised.value.hint == "pip install litellm"


def test_b14_what_is_no_judge_is_said() -> None:
    with pytest.raises(JudgeUnusable):
        score(of_worth(), 7)


# ------------------------------------------------------------------ message lists


def test_b14_message_lists_are_scored_in_their_order() -> None:
    lists = [[SYSTEM, LETTER, {"role": "assistant", "content": f"worth {it:.4f}"}] for it in WORTH]
    with played_judge() as judge:
        found = asyncio.run(ruler(lists, judge.model, cache=None))
    assert [it.score for it in found] == WORTH
    assert [it.trajectory_id for it in found] == [str(place) for place in range(1, 9)]
    assert asyncio.run(ruler([], judge.model)) == []
