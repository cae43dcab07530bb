"""What of trajectories becomes a member, and what is counted (B12): ours, theirs, or the JSON of either."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import pytest
from openai.types.chat.chat_completion import Choice

from launcher.client.trajectories.members import (
    NAMED_TWICE,
    NO_ANSWER,
    NO_REWARD,
    OTHER_MODEL,
    group_of,
    version_of,
)


def choice(sample: str | None, text: str = "yes") -> Choice:
    """As OpenAI's SDK parses an answer's choice; without a sample it is another model's."""
    named = {} if sample is None else {"slipway": {"sample": sample, "version": 3}}
    message = {"role": "assistant", "content": text}
    return Choice.model_validate({"finish_reason": "stop", "index": 0, "message": message, **named})


ASKED = {"role": "user", "content": "Well?"}


def history(*samples: str | None) -> list[Any]:
    return [entry for sample in samples for entry in (ASKED, choice(sample))]


def trajectory(*samples: str | None, reward: Any = 1.0, **more: Any) -> dict[str, Any]:
    return {"messages_and_choices": history(*samples), "reward": reward, **more}


def test_b12_a_trajectory_is_one_member_by_its_own_answers() -> None:
    made, dropped = group_of([trajectory("a", "b", reward=0.5), trajectory("c")], "g")
    assert made is not None
    assert made.id == "g"
    assert [(it.samples, it.reward) for it in made.members] == [(["a", "b"], 0.5), (["c"], 1.0)]
    assert not dropped


def test_b12_another_models_answer_in_the_history_is_counted_and_not_named() -> None:
    made, dropped = group_of([trajectory("a", None, "b", None)], "g")
    assert made is not None
    assert made.members[0].samples == ["a", "b"]
    assert dropped == Counter({OTHER_MODEL: 2})


def test_b12_a_written_assistant_message_is_context_and_counted_nowhere() -> None:
    written = {"role": "assistant", "content": "yes"}
    made, dropped = group_of([{"messages_and_choices": [ASKED, written, choice("a")], "reward": 1}], "g")
    assert made is not None
    assert (made.members[0].samples, dropped) == (["a"], Counter())


def test_b12_additional_histories_are_trained_and_what_stands_in_two_is_named_once() -> None:
    more = [{"messages_and_choices": history("a", "c")}, {"messages_and_choices": history("d", None)}]
    made, dropped = group_of([trajectory("a", "b", additional_histories=more)], "g")
    assert made is not None
    assert made.members[0].samples == ["a", "b", "c", "d"]
    assert dropped == Counter({NAMED_TWICE: 1, OTHER_MODEL: 1})


@pytest.mark.parametrize(
    ("trajectories", "counted"),
    [
        ([], {}),
        ([{"messages_and_choices": [], "reward": 1.0}], {NO_ANSWER: 1}),
        ([{"messages_and_choices": [ASKED], "reward": 1.0}], {NO_ANSWER: 1}),
        ([trajectory(None, None)], {OTHER_MODEL: 2}),
        ([ValueError("no"), TimeoutError()], {"raised ValueError": 1, "raised TimeoutError": 1}),
    ],
)
def test_b12_where_nothing_is_left_to_train_there_is_no_group(
    trajectories: list[Any], counted: dict[str, int]
) -> None:
    assert group_of(trajectories, "g") == (None, Counter(counted))


@pytest.mark.parametrize(
    "said", ["<class 'ValueError'>", "<class 'builtins.ValueError'>", "ValueError", "builtins.ValueError"]
)
def test_b12_a_groups_exceptions_are_counted_by_their_type(said: str) -> None:
    raised = {"type": said, "message": "no", "traceback": ""}
    made, dropped = group_of({"trajectories": [trajectory("a")], "exceptions": [raised] * 3}, "g")
    assert made is not None
    assert dropped == Counter({"raised ValueError": 3})


@pytest.mark.parametrize("reward", [None, "good", [1.0]])
def test_b12_what_is_no_number_is_no_reward(reward: Any) -> None:
    made, _ = group_of([trajectory("a", reward=reward)], "g")
    assert made is not None
    assert (made.members[0].reward, made.members[0].failure) == (None, NO_REWARD)


def test_b12_a_reward_that_is_not_finite_is_sent_as_it_is_and_so_is_a_truth() -> None:
    made, _ = group_of([trajectory("a", reward=math.nan), trajectory("b", reward=True)], "g")
    assert made is not None
    assert [str(it.reward) for it in made.members] == ["nan", "1.0"]


def test_b12_a_trajectory_may_name_its_rollout_instead() -> None:
    made, dropped = group_of([{"messages_and_choices": [ASKED], "rollout": "r-1", "reward": 0.25}], "g")
    assert made is not None
    assert (made.members[0].rollout, made.members[0].reward, dropped) == ("r-1", 0.25, Counter())


def test_b12_the_json_of_a_group_says_the_same() -> None:
    turns = trajectory("a", None, "b")
    there = [one.model_dump() if isinstance(one, Choice) else one for one in turns["messages_and_choices"]]
    said = json.loads(json.dumps({"trajectories": [turns | {"messages_and_choices": there}]}))
    assert group_of(said, "g") == group_of([turns], "g")


def test_b12_litellm_keeps_a_choices_name_in_a_place_of_its_own() -> None:
    said = {"finish_reason": "stop", "message": {"role": "assistant", "content": "yes"}}
    choices = [said | {"provider_specific_fields": {"slipway": {"sample": "a", "version": 3}}},
               said | {"provider_specific_fields": {"refusal": None}},
               said | {"provider_specific_fields": None}]  # fmt: skip
    made, dropped = group_of([{"messages_and_choices": choices, "reward": 1}], "g")
    assert made is not None
    assert (made.members[0].samples, dropped) == (["a"], Counter({OTHER_MODEL: 2}))
    assert [version_of(it) for it in choices] == [3, None, None]
