"""What is recorded of an answer, what of it may be trained on, and what a new process still knows."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from runtime.gateway.engines.engine_client import EngineFacts
from runtime.gateway.requests import distribution
from runtime.gateway.samples import content_key, samples
from runtime.gateway.samples.samples import SampleStore
from runtime.gateway.steps.batch_building import build
from runtime.gateway.steps.selection import Selection, select
from runtime.shared.batch import Batch, read_batch, write_batch
from runtime.shared.schema import Group, Member
from tests.runtime.recorded import MESSAGES, answer, asked, choice, record, sampled


def pick(store: SampleStore, *rollouts: str, **narrowed: Any) -> Selection:
    members = [
        Member(rollout=rollout, reward=float(index), **narrowed) for index, rollout in enumerate(rollouts)
    ]
    groups = [Group(id="g", members=members)]
    return select(groups, store, taken=lambda _: False, staleness_of=lambda _: 0, max_staleness=2)


def batch_of(store: SampleStore, *rollouts: str) -> Batch:
    return build(pick(store, *rollouts), store, {"schema": 1, "kind": "train", "step": 1})


# ------------------------------------------------------------------ C1


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    corpus = ["the cat sat on the mat, the théâtre and the theme"] * 20
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    return tokenizer


TOKENIZER = _tokenizer()
TOKEN_IDS = st.lists(st.integers(0, TOKENIZER.get_vocab_size() - 1), min_size=1, max_size=24)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(prompt=TOKEN_IDS, completion=TOKEN_IDS)
def test_c01_what_is_trained_is_the_engines_ids_whatever_the_text_would_give(
    tmp_path_factory: pytest.TempPathFactory, prompt: list[int], completion: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("c01")
    store = SampleStore(folder / "samples")
    logprobs: list[float | None] = [-0.125 * (place + 1) for place in range(len(completion))]
    text = TOKENIZER.decode(completion)
    record(store, asked(rollout="r"), answer(prompt, choice(completion, logprobs, text)))
    write_batch(folder / "000001", batch_of(store, "r"))
    batch = read_batch(folder / "000001")
    assert batch.tokens.tolist() == prompt + completion
    assert batch.sampled.tolist() == [0] * len(prompt) + [1] * len(completion)
    assert batch.logprobs.tolist() == [0.0] * len(prompt) + logprobs
    assert batch.meta["counts"]["retokenised"] == 0


def test_the_property_is_tried_on_ids_that_their_text_would_not_give_back() -> None:
    letters = [TOKENIZER.token_to_id(letter) for letter in "the"]
    assert TOKENIZER.encode(TOKENIZER.decode(letters)).ids != letters


# ------------------------------------------------------------------ C9, C10, C48


@pytest.mark.parametrize("bad", [None, math.nan, -math.inf, math.inf, -9999.0])
def test_c10_a_sample_with_a_logprob_that_is_no_number_is_dropped_and_counted(
    tmp_path: Path, bad: float | None
) -> None:
    store = SampleStore(tmp_path)
    content = (
        answer([1], choice([2, 3], [-0.5, bad])).replace(b"-Infinity", b"null").replace(b"Infinity", b"null")
    )
    record(store, asked(rollout="bad"), content.replace(b"NaN", b"null"))
    sampled(store, "good")
    selection = pick(store, "bad", "good")
    assert selection.counts.dropped == {"logprob not finite": 1}
    assert selection.counts.trained == 1
    assert np.isfinite(batch_of(store, "bad", "good").logprobs).all()


def test_a_sample_without_a_logprob_for_each_token_is_dropped_and_counted(tmp_path: Path) -> None:
    store = SampleStore(tmp_path)
    record(store, asked(rollout="short"), answer([1], choice([2, 3], [-0.5])))
    record(store, asked(rollout="nothing"), answer([1], choice([], [])))
    assert pick(store, "short", "nothing").counts.dropped == {"logprobs missing": 1, "empty completion": 1}


TOOL = {"type": "function", "function": {"name": "f"}}
CUTTING = [
    ({"temperature": 0}, "greedy"),
    ({"top_p": 0.9}, "top_p"),
    ({"top_k": 40}, "top_k"),
    ({"min_p": 0.1}, "min_p"),
    ({"presence_penalty": 0.5}, "presence_penalty"),
    ({"frequency_penalty": -0.5}, "frequency_penalty"),
    ({"repetition_penalty": 1.1}, "repetition_penalty"),
    ({"logit_bias": {"5": 10}}, "logit_bias"),
    ({"bad_words": ["cat"]}, "bad_words"),
    ({"allowed_token_ids": [1, 2]}, "allowed_token_ids"),
    ({"min_tokens": 3}, "min_tokens"),
    ({"response_format": {"type": "structural_tag", "format": {}}}, "response_format"),
    ({"response_format": {"type": "json_object"}, "tools": [TOOL]}, "response_format"),
    ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "response_format"),
    ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a+", "whitespace_pattern": " "}}, "structured_outputs"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
]
KEEPING = {
    "temperature": 0.7, "top_p": 1.0, "top_k": -1, "min_p": 0, "presence_penalty": 0,
    "frequency_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": {}, "min_tokens": 0,
    "response_format": {"type": "text"},
    "tools": [TOOL], "tool_choice": "auto", "max_tokens": 5,
    "stop": ["x"], "n": 2,
}  # fmt: skip


@pytest.mark.parametrize(("setting", "reason"), CUTTING)
def test_c09_a_setting_that_changes_the_support_is_refused_by_name(
    tmp_path: Path, setting: dict[str, Any], reason: str
) -> None:
    store = SampleStore(tmp_path)
    sampled(store, "cut", **setting)
    sampled(store, "whole", **KEEPING)
    assert pick(store, "cut", "whole").counts.dropped == {reason: 1}


def test_r08_a_tiny_temperature_is_trained_at_the_one_that_the_engine_sampled_with(tmp_path: Path) -> None:
    store = SampleStore(tmp_path)
    sampled(store, "tiny", temperature=0.001)
    assert batch_of(store, "tiny").temperature.tolist() == pytest.approx([0.01])


def test_c09_what_an_agents_sdk_sends_with_every_tool_costs_a_rollout_no_sample(tmp_path: Path) -> None:
    store = SampleStore(tmp_path)
    strict = {"type": "function", "function": {"name": "f", "strict": True}}
    sampled(store, "free", tools=[strict, TOOL])
    sampled(store, "chosen", tools=[strict], tool_choice="auto")
    sampled(store, "forced", tools=[strict], tool_choice="required")
    counts = pick(store, "free", "chosen", "forced").counts
    assert (counts.trained, counts.dropped) == (2, {"tool_choice": 1})


def test_c09_r01_calls_one_at_a_time_cost_a_rollout_no_sample(tmp_path: Path) -> None:
    store = SampleStore(tmp_path)
    sampled(store, "one", tools=[TOOL], parallel_tool_calls=False)
    sampled(store, "chosen", tools=[TOOL], tool_choice="auto", parallel_tool_calls=False)
    sampled(store, "forced", tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    counts = pick(store, "one", "chosen", "forced").counts
    assert (counts.trained, counts.dropped) == (2, {"tool_choice": 1})


def test_c09_what_a_grammar_holds_to_one_call_is_no_sample() -> None:
    """Of no rollout the engine is asked as its client asked."""
    body = asked(tools=[TOOL], parallel_tool_calls=False).body
    assert distribution.distorted_by(body) == "parallel_tool_calls"


def test_settings_at_their_neutral_values_leave_the_support_whole() -> None:
    assert distribution.distorted_by(KEEPING) is None
    assert distribution.distorted_by({"parallel_tool_calls": False}) is None
    strict = [{"type": "function", "function": {"name": "f", "strict": True}}]
    assert distribution.distorted_by({"tools": strict}) == "tools"
    assert (
        distribution.distorted_by({"tools": strict, "tool_choice": "none", "parallel_tool_calls": False})
        is None
    )
    assert distribution.distorted_by(dict.fromkeys(KEEPING)) is None


def test_c48_what_was_sampled_for_evaluation_never_enters_training(tmp_path: Path) -> None:
    store = SampleStore(tmp_path)
    sampled(store, "r", x_slipway_purpose="eval")
    (trained,) = sampled(store, "r")
    selection = pick(store, "r")
    assert selection.ids == [trained]
    assert selection.counts.dropped == {"evaluation": 1}


def test_c05_an_answer_that_calls_a_tool_and_is_then_cut_off_is_flagged(tmp_path: Path) -> None:
    """vLLM says "tool_calls" of both: of an answer that ended, and of one that met its limit."""
    store = SampleStore(tmp_path)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    called = choice([7, 8, 9], [-1.0] * 3) | {"finish_reason": "tool_calls"}
    called["message"] = {"role": "assistant", "content": None, "tool_calls": [call]}
    facts = EngineFacts(context_length=5)
    for rollout, prompt, limits in (
        ("ended", [1], {"max_tokens": 4}),
        ("at its limit", [1], {"max_tokens": 3}),
        ("at its newer limit", [1], {"max_completion_tokens": 3, "max_tokens": 9}),
        ("at the end of the context", [1, 2], {}),
    ):
        request = asked(None, rollout, tools=[TOOL], **limits)
        record(store, request, answer(prompt, called), engine=facts)
    batch = batch_of(store, "ended", "at its limit", "at its newer limit", "at the end of the context")
    assert batch.truncated.tolist() == [0, 1, 1, 1]


# ------------------------------------------------------------------ rollouts, predictors, calls


def test_a_reward_holds_for_the_samples_its_member_names(tmp_path: Path) -> None:
    store = SampleStore(tmp_path)
    for predictor in ("first", "second"):
        for call in ("0", "1"):
            sampled(store, "r", x_slipway_predictor=predictor, x_slipway_call=call)
    assert len(pick(store, "r").samples) == 4
    assert len(pick(store, "r", predictor="first").samples) == 2
    (only,) = pick(store, "r", predictor="second", call=1).samples
    assert (only[0].tags.predictor, only[0].tags.call) == ("second", 1)


def test_a_groups_predictor_narrows_members_that_name_none(tmp_path: Path) -> None:
    store = SampleStore(tmp_path)
    for predictor in ("first", "second"):
        sampled(store, "r", x_slipway_predictor=predictor)
    groups = [
        Group(id=name, predictor=name, members=[Member(rollout="r", reward=1.0)])
        for name in ("first", "second")
    ]
    selection = select(groups, store, taken=lambda _: False, staleness_of=lambda _: 0, max_staleness=2)
    assert [(ref.tags.predictor, member) for ref, member in selection.samples] == [
        ("first", 0),
        ("second", 1),
    ]


def test_each_choice_of_an_answer_is_a_sample(tmp_path: Path) -> None:
    store = SampleStore(tmp_path)
    choices = [choice([10 + index], [-1.0], index=index) for index in range(3)]
    record(store, asked(rollout="r", n=3), answer([1, 2], *choices))
    batch = batch_of(store, "r")
    assert batch.tokens.tolist() == [1, 2, 10, 1, 2, 11, 1, 2, 12]
    assert batch.member.tolist() == [0, 0, 0]


def test_everything_named_is_trained_or_counted(tmp_path: Path) -> None:
    store = SampleStore(tmp_path)
    for rollout in ("good", "failed", "nan", "old"):
        sampled(store, rollout, version=0 if rollout == "old" else 5)
    (taken,) = sampled(store, "taken", version=5)
    members = [
        Member(rollout="good", reward=1.0),
        Member(rollout="good", reward=1.0),
        Member(rollout="failed", failure="metric raised"),
        Member(rollout="nan", reward=math.nan),
        Member(rollout="old", reward=0.0),
        Member(rollout="taken", reward=0.0),
        Member(rollout="unseen", reward=0.0),
        Member(rollout="never sampled", failure="timed out"),
    ]
    selection = select(
        [Group(id="g", members=members)],
        store,
        taken=lambda sample: sample == taken,
        staleness_of=lambda version: 5 - version,
        max_staleness=2,
    )
    counts = selection.counts
    assert counts.dropped == {
        "named twice": 1, "metric raised": 1, "reward not finite": 1, "stale": 1, "already trained": 1,
        "no sample": 1, "timed out": 1,
    }  # fmt: skip
    missing = 2
    assert counts.trained + sum(counts.dropped.values()) == counts.samples + missing
    assert (counts.members, counts.trained, len(selection.members)) == (8, 1, 1)


# ------------------------------------------------------------------ journal


def test_a_new_process_knows_every_sample_and_stored_answer(tmp_path: Path) -> None:
    store = SampleStore(tmp_path)
    request = asked("q1", "r")
    record(store, request, answer([1, 2], choice([3], [-0.5], "bonjour")))
    again = SampleStore(tmp_path)
    assert again.count == 1
    assert batch_of(again, "r").tokens.tolist() == [1, 2, 3]
    stored = again.stored("q1")
    assert stored is not None and stored.digest == request.digest
    body = json.loads(bytes(again.answer("q1").answer))
    assert body["choices"][0]["message"]["content"] == "bonjour"
    assert body["model"] == "policy@v0"


def test_a_line_cut_short_costs_that_line_only(tmp_path: Path) -> None:
    store = SampleStore(tmp_path)
    sampled(store, "first")
    sampled(store, "second")
    (file,) = tmp_path.glob("*.jsonl")
    file.write_bytes(file.read_bytes()[:-20])
    again = SampleStore(tmp_path)
    sampled(again, "third")
    last = SampleStore(tmp_path)
    assert [len(last.of_rollout(name)) for name in ("first", "second", "third")] == [1, 0, 1]


def test_a_journal_that_cannot_begin_its_next_file_writes_into_no_other(tmp_path: Path) -> None:
    """The number of a file that was closed is soon another's: a client's connection, for instance."""
    store = SampleStore(tmp_path / "samples")
    sampled(store, "first")
    store._journal._file_bytes = 0
    (tmp_path / "samples" / "000002.jsonl").touch()  # its name is taken
    with pytest.raises(FileExistsError):
        sampled(store, "not recorded")
    with (tmp_path / "another").open("wb"):
        sampled(store, "second")
    assert (tmp_path / "another").read_bytes() == b""
    again = SampleStore(tmp_path / "samples")
    assert [len(again.of_rollout(name)) for name in ("first", "not recorded", "second")] == [1, 0, 1]


def test_an_answer_nobody_received_is_no_sample_until_a_retry_claims_it(tmp_path: Path) -> None:
    store = SampleStore(tmp_path)
    record(store, asked("q", "r"), answer([1], choice([2], [-0.5])), delivered=False)
    assert store.of_rollout("r") == [] == SampleStore(tmp_path).of_rollout("r")
    store.mark_received("q")
    assert len(store.of_rollout("r")) == 1 == len(SampleStore(tmp_path).of_rollout("r"))


# ------------------------------------------------------------------ C52


def sample(store: SampleStore, request: str, delivered: bool = True, **fields: Any) -> None:
    content = answer([1], choice([2], [-0.5]))
    record(store, asked(request, "r", **fields), content, delivered=delivered)


def trained(store: SampleStore) -> list[str]:
    """The requests of a rollout's samples."""
    return [ref.request for ref in store.of_rollout("r")]


def test_c52_an_answer_nobody_received_trains_nothing_and_is_counted(tmp_path: Path) -> None:
    store = SampleStore(tmp_path)
    sample(store, "unread", delivered=False)
    sample(store, "read", delivered=False)
    store.mark_received("read")
    for known in (store, SampleStore(tmp_path)):
        counts = pick(known, "r").counts
        assert (counts.samples, counts.trained, counts.unreceived, counts.dropped) == (1, 1, 1, {})
        assert trained(known) == ["read"] and known.knows("r")


def test_c52_a_rollout_whose_answers_nobody_received_says_so(tmp_path: Path) -> None:
    store = SampleStore(tmp_path)
    sample(store, "q", delivered=False, x_slipway_predictor="first")
    counts = pick(store, "r").counts
    assert (counts.samples, counts.unreceived, counts.dropped) == (0, 1, {"answer not received": 1})
    counts = pick(store, "r", predictor="second").counts
    assert (counts.unreceived, counts.dropped) == (0, {"no sample": 1})


def test_c52_a_call_asked_again_after_its_connection_broke_trains_once(tmp_path: Path) -> None:
    store = SampleStore(tmp_path)
    sample(store, "first", delivered=False)
    store.mark_received("first")
    store.mark_uncertain("first")
    assert trained(store) == ["first"], "nobody asked again"
    sample(store, "other call", temperature=0.5)
    sample(store, "again", delivered=False)
    assert trained(store) == ["first", "other call"], "nor has the second answer arrived"
    store.mark_received("again")
    for known in (store, SampleStore(tmp_path)):
        assert trained(known) == ["other call", "again"]
        assert pick(known, "r").counts.unreceived == 1


@pytest.mark.parametrize(
    ("rollout", "tags"),
    [
        ("another", {}),
        ("r", {"x_slipway_predictor": "second"}),
        ("r", {"x_slipway_call": "1"}),
        ("r", {"x_slipway_purpose": "eval"}),
    ],
)
def test_c52_the_same_words_asked_for_something_else_replace_nothing(
    tmp_path: Path, rollout: str, tags: dict[str, str]
) -> None:
    """A whole group asks one question: that one member's connection broke says nothing of the others."""
    store = SampleStore(tmp_path)
    sample(store, "doubtful", x_slipway_predictor="first", x_slipway_call="0")
    store.mark_uncertain("doubtful")
    given = {"x_slipway_predictor": "first", "x_slipway_call": "0"} | tags
    record(store, asked("other", rollout, **given), answer([1], choice([2], [-0.5])))
    for known in (store, SampleStore(tmp_path)):
        assert "doubtful" in trained(known)
        assert [ref.request for ref in known.of_rollout(rollout)][-1] == "other"
    sample(store, "again", x_slipway_predictor="first", x_slipway_call="0")
    assert "doubtful" not in trained(store)


def test_c52_receipts_that_are_told_again_say_what_they_said(tmp_path: Path) -> None:
    """The gateway had taken them, and its answer to the relay was lost: again in order, with what is new."""
    store = SampleStore(tmp_path)
    sample(store, "first", delivered=False)
    sample(store, "again", delivered=False)
    told = [("mark_received", "first"), ("mark_uncertain", "first"), ("mark_received", "again")]
    for say, request in [*told, *told[:1], *told, *told]:
        getattr(store, say)(request)
    for known in (store, SampleStore(tmp_path)):
        assert trained(known) == ["again"]
        assert pick(known, "r").counts.unreceived == 1


def test_c52_the_same_call_made_twice_trains_twice(tmp_path: Path) -> None:
    store = SampleStore(tmp_path)
    for request in ("first", "second"):
        sample(store, request, delivered=False)
        store.mark_received(request)
        store.mark_received(request)
    assert trained(store) == trained(SampleStore(tmp_path)) == ["first", "second"]


def test_c52_an_answer_replayed_under_its_id_is_no_longer_doubtful(tmp_path: Path) -> None:
    store = SampleStore(tmp_path)
    sample(store, "first")
    store.mark_uncertain("first")
    store.mark_received("first")
    sample(store, "second")
    assert trained(store) == trained(SampleStore(tmp_path)) == ["first", "second"]


def test_c52_what_was_lost_on_its_way_is_no_sample_until_it_is_received(tmp_path: Path) -> None:
    store = SampleStore(tmp_path)
    sample(store, "q")
    store.mark_lost("q")
    assert trained(store) == trained(SampleStore(tmp_path)) == []
    store.mark_received("q")
    assert trained(store) == trained(SampleStore(tmp_path)) == ["q"]


def test_c52_what_is_said_of_a_request_nobody_made_is_passed_over(tmp_path: Path) -> None:
    store = SampleStore(tmp_path)
    for say in (store.mark_received, store.mark_uncertain, store.mark_lost):
        say("unknown")
    sample(store, "q")
    assert trained(store) == trained(SampleStore(tmp_path)) == ["q"]


def test_only_so_many_untagged_samples_are_kept_in_mind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples, "REMEMBERED_UNTAGGED", 2)
    store = SampleStore(tmp_path)
    said = ["same", "same", "other"]
    ids = [record(store, asked(), answer([1], choice([2], [-0.5], text)))[0] for text in said]
    assert [len(store.of_sample(one)) for one in ids] == [0, 1, 1]
    kept = [store.of_content(content_key.key(MESSAGES, text)) for text in ("same", "other")]
    assert [[ref.id for ref in refs] for refs in kept] == [[ids[1]], [ids[2]]]
    assert store.count == 3
    again = SampleStore(tmp_path)  # the newest, in another process too
    assert [len(again.of_sample(one)) for one in ids] == [0, 1, 1]


def test_what_the_client_did_not_ask_for_is_not_in_its_answer(tmp_path: Path) -> None:
    store = SampleStore(tmp_path)
    content = answer([1], choice([2], [-0.5]))
    record(store, asked("plain"), content)
    record(store, asked("full", logprobs=True, return_token_ids=True), content)
    plain = json.loads(bytes(store.answer("plain").answer))
    full = json.loads(bytes(store.answer("full").answer))
    assert plain["choices"][0]["logprobs"] is None
    assert not {"prompt_token_ids", "token_ids"} & {*plain, *plain["choices"][0]}
    assert full["prompt_token_ids"] == [1] and full["choices"][0]["token_ids"] == [2]
    assert full["choices"][0]["logprobs"]["content"][0]["logprob"] == -0.5
