"""The policy as a DSPy LM: what is asked over the wire, with which tags, from threads and async too."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

import dspy
import pytest
from dspy.utils.exceptions import LMAuthError, LMInvalidRequestError, LMServerError, LMTransportError

from launcher.client import PolicyLM, Session, connect, rollout
from launcher.client.dspy.predictors import UNNAMED_PREDICTOR
from launcher.client.dspy.programs import strict_adapter
from launcher.client.wire import Patience
from tests.support.small_run import TOKEN, Asked, SmallRun, answering


@pytest.fixture
def run() -> Iterator[SmallRun]:
    small = SmallRun()
    yield small
    small.close()


@pytest.fixture
def session(run: SmallRun) -> Session:
    return run.session()


class TwoOfAKind(dspy.Module):
    """Two predictors that share one Signature class."""

    def __init__(self) -> None:
        super().__init__()
        self.first = dspy.Predict("english -> french")
        self.second = dspy.ChainOfThought("english -> french")

    def forward(self, english: str) -> dspy.Prediction:
        self.first(english=english)
        self.first(english=english)
        return self.second(english=english)


def tags(asked: Asked) -> tuple[str | None, ...]:
    return asked.tag("rollout"), asked.tag("predictor"), asked.tag("call")


def test_no_deprecated_interface_of_dspy_is_used(run: SmallRun, session: Session) -> None:
    with warnings.catch_warnings(), dspy.context(lm=PolicyLM(session)):
        warnings.simplefilter("error", DeprecationWarning)
        warnings.simplefilter("error", FutureWarning)
        assert dspy.Predict("english -> french")(english="hello").french == "bonjour"


def test_the_body_is_standard_chat_completions_and_settings_arrive(run: SmallRun, session: Session) -> None:
    lm = PolicyLM(
        session, temperature=0.7, max_tokens=40, stop=["\n\n\n"], top_k=5, extra_body={"min_p": 0.1}
    )
    with dspy.context(lm=lm):
        dspy.Predict("english -> french")(english="hello", config={"seed": 3})
    body = run.asked[0].body
    assert [it["role"] for it in body.pop("messages")] == ["system", "user"]
    assert body == {
        "model": "policy",
        "temperature": 0.7,
        "max_tokens": 40,
        "stop": ["\n\n\n"],
        "seed": 3,
        "top_k": 5,
        "min_p": 0.1,
    }


def test_tools_are_sent_and_tool_calls_come_back(run: SmallRun, session: Session) -> None:
    tool = {
        "type": "function",
        "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
    }
    run.answer = lambda asked: "no call"
    PolicyLM(session)(messages=[{"role": "user", "content": "hi"}], tools=[tool])
    assert run.asked[0].body["tools"][0]["function"]["name"] == "look"


@pytest.mark.parametrize(
    ("adapter", "answer"),
    [
        (dspy.ChatAdapter(), "[[ ## french ## ]]\nbonjour\n\n[[ ## completed ## ]]"),
        (dspy.JSONAdapter(), '{"french": "bonjour"}'),
        (dspy.XMLAdapter(), "<french>bonjour</french>"),
    ],
)
def test_every_adapter_works_and_none_constrains_the_sampling(
    run: SmallRun, session: Session, adapter: dspy.Adapter, answer: str
) -> None:
    run.answer = lambda asked: answer
    with dspy.context(lm=PolicyLM(session), adapter=adapter):
        assert dspy.Predict("english -> french")(english="hello").french == "bonjour"
    assert "response_format" not in run.asked[0].body  # a grammar would sample from another distribution (C9)


def test_n_makes_as_many_samples_each_with_its_own_call_and_request(run: SmallRun, session: Session) -> None:
    program = dspy.Predict("english -> french", n=3)
    with dspy.context(lm=PolicyLM(session)), rollout(program):
        assert len(program(english="hello").completions.french) == 3
    assert [it.tag("call") for it in run.asked] == ["0", "1", "2"]
    assert len({it.tag("request") for it in run.asked}) == 3


def test_predictors_that_share_a_signature_are_told_apart(run: SmallRun, session: Session) -> None:
    run.answer = answering(reasoning="so", french="bonjour")
    program = TwoOfAKind()
    with dspy.context(lm=PolicyLM(session)), rollout(program, "r1") as it:
        program(english="hello")
    assert [tags(asked) for asked in run.asked] == [
        ("r1", "first", "0"),
        ("r1", "first", "1"),
        ("r1", "second.predict", "0"),
    ]
    assert it.calls == {"first": 2, "second.predict": 1}
    assert run.asked[0].tag("purpose") is None


def test_a_deep_copy_run_inside_another_module_keeps_its_predictors_names(
    run: SmallRun, session: Session
) -> None:
    program = dspy.BestOfN(
        dspy.Predict("english -> french"), N=2, reward_fn=lambda args, pred: 0.0, threshold=1.0
    )
    (name,) = [name for name, _ in program.named_predictors()]
    with dspy.context(lm=PolicyLM(session)), rollout(program):
        program(english="hello")
    assert [it.tag("predictor") for it in run.asked] == [name, name]


def test_a_predictor_made_on_the_spot_is_tagged_as_other(run: SmallRun, session: Session) -> None:
    with dspy.context(lm=PolicyLM(session)), rollout(dspy.Predict("a -> b")):
        dspy.Predict("english -> french")(english="hello")
    assert run.asked[0].tag("predictor") == UNNAMED_PREDICTOR


@pytest.mark.process
def test_rollouts_in_threads_keep_their_tags_apart(run: SmallRun, session: Session) -> None:
    program = dspy.Predict("english -> french")
    lm = PolicyLM(session)

    def one(number: int) -> None:
        with dspy.context(lm=lm), rollout(program, f"r{number}"):
            for _ in range(5):
                program(english=f"word {number}")

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(one, range(32)))
    for number in range(32):
        own = [it for it in run.asked if f"word {number}\n" in it.user]
        assert sorted(tags(it) for it in own) == [(f"r{number}", "self", str(call)) for call in range(5)]


def test_threads_that_dspy_starts_belong_to_the_rollout(run: SmallRun, session: Session) -> None:
    program = dspy.Predict("english -> french")
    pairs = [(program, dspy.Example(english=f"word {i}").with_inputs("english")) for i in range(6)]
    with dspy.context(lm=PolicyLM(session)), rollout(program, "r1"):
        dspy.Parallel(num_threads=4, disable_progress_bar=True)(pairs)
    assert sorted(tags(it) for it in run.asked) == [("r1", "self", str(call)) for call in range(6)]


def test_threads_of_the_programs_own_count_as_astray_unless_the_context_is_copied(
    run: SmallRun, session: Session
) -> None:
    program, lm = dspy.Predict("english -> french"), PolicyLM(session)
    program.lm = lm
    with rollout(program, "r1"), ThreadPoolExecutor(1) as pool:
        pool.submit(program, english="astray").result()
        assert lm.policy.untagged_requests == 1
        pool.submit(copy_context().run, lambda: program(english="kept")).result()
    assert lm.policy.untagged_requests == 1
    assert [it.tag("rollout") for it in run.asked] == [None, "r1"]


@pytest.mark.slow
def test_async_programs_are_tagged_in_each_task(run: SmallRun, session: Session) -> None:
    program, lm = dspy.Predict("english -> french"), PolicyLM(session)

    async def one(number: int) -> str:
        with dspy.context(lm=lm), rollout(program, f"r{number}"):
            return (await program.acall(english=f"word {number}")).french

    async def everyone() -> list[str]:
        return await asyncio.gather(*(one(number) for number in range(8)))

    assert asyncio.run(everyone()) == ["bonjour"] * 8
    assert asyncio.run(everyone()) == ["bonjour"] * 8  # another loop has sockets of its own
    assert sorted(tags(it) for it in run.asked) == sorted(
        (f"r{n}", "self", "0") for n in range(8) for _ in "12"
    )


@pytest.mark.process
def test_a_retried_request_has_one_id_and_makes_one_sample(run: SmallRun, session: Session) -> None:
    lm = PolicyLM(session)
    run.break_next += ["cut after", 503]
    with rollout():
        lm("hello")
    assert len(run.asked) == 1
    assert len([path for path, _ in run.posted if path.endswith("completions")]) == 3


def test_errors_are_real_errors_at_once(run: SmallRun, session: Session) -> None:
    def error(status: int) -> Any:
        return lambda asked: (
            status,
            {"error": {"message": "because", "type": "t", "param": None, "code": None}},
        )

    lm = PolicyLM(session)
    for status, kind in ((500, LMServerError), (404, LMInvalidRequestError), (401, LMAuthError)):
        run.answer = error(status)
        with rollout() as it, pytest.raises(kind, match="because"):
            lm("hello")
        assert it.endpoint_errors == [f"HTTP {status}: because"]
    assert len(run.asked) == 3


@pytest.mark.parametrize(
    ("status", "code", "is_lost"),
    [
        (400, "context_length_exceeded", False),
        (400, "unsupported_content", False),
        (413, None, False),
        (400, "request_failed", True),
    ],
)
def test_c22_what_a_program_asks_in_vain_is_not_lost_but_what_an_engine_fails_at_is(
    run: SmallRun, session: Session, status: int, code: str | None, is_lost: bool
) -> None:
    error = {"message": "because", "type": "invalid_request_error", "param": None, "code": code}
    run.answer = lambda asked: (status, {"error": error})
    with rollout() as it, pytest.raises(LMInvalidRequestError, match="because"):
        PolicyLM(session)("hello")
    assert (bool(it.endpoint_errors), it.is_unreachable) == (is_lost, False)


@pytest.mark.process
def test_a_lost_endpoint_raises_and_the_rollout_remembers(run: SmallRun) -> None:
    lm = PolicyLM(connect(run.base_url, TOKEN, Patience(answer_seconds=1.0, away_seconds=0.3)))
    run.break_next += [503] * 20
    with rollout() as it, pytest.raises(LMTransportError, match="No answer from the run"):
        lm("hello")
    assert it.endpoint_errors


def test_a_rollout_is_never_answered_from_a_cache(run: SmallRun, session: Session) -> None:
    lm = PolicyLM(session, cache=True, temperature=1.0)
    program = dspy.Predict("english -> french", cache=True)
    with dspy.context(lm=lm):
        for _ in range(3):
            with rollout(program):
                program(english="never the same twice")
    assert len(run.asked) == 3


def test_a_cached_name_is_a_version_because_it_is_the_caches_key(run: SmallRun) -> None:
    run.version = 7
    assert PolicyLM(run.session(), cache=True).model == "policy@v7"
    assert PolicyLM(run.session()).model == "policy"


def test_copies_share_the_endpoint(run: SmallRun, session: Session) -> None:
    program = dspy.Predict("english -> french")
    program.set_lm(PolicyLM(session, max_tokens=9))
    copied = program.deepcopy()
    assert copied.lm is not program.lm and copied.lm.policy is program.lm.policy
    assert copied(english="hello").french == "bonjour"


def test_a_plain_lm_becomes_a_policy_with_the_same_settings(run: SmallRun, session: Session) -> None:
    plain = dspy.LM(
        "openai/policy",
        api_base=run.base_url,
        api_key=TOKEN,
        temperature=0.5,
        max_tokens=7,
        repetition_penalty=1.1,
    )
    PolicyLM.from_lm(plain, session)("hello")
    body = run.asked[0].body
    assert (body["temperature"], body["max_tokens"], body["repetition_penalty"]) == (0.5, 7, 1.1)


def test_the_strict_adapter_does_not_try_again_as_json(run: SmallRun, session: Session) -> None:
    run.answer = lambda asked: "I would rather not"
    lenient = dspy.ChatAdapter()
    with (
        dspy.context(lm=PolicyLM(session), adapter=lenient),
        pytest.raises(dspy.utils.exceptions.AdapterParseError),
    ):
        dspy.Predict("english -> french")(english="hello")
    assert len(run.asked) == 2
    for adapter in (
        strict_adapter(lenient),
        strict_adapter(dspy.XMLAdapter()),
        strict_adapter(dspy.JSONAdapter()),
    ):
        run.asked.clear()
        with dspy.context(lm=PolicyLM(session), adapter=adapter), pytest.raises(Exception, match="parse"):
            dspy.Predict("english -> french")(english="hello")
        assert len(run.asked) == 1
    assert lenient.use_json_adapter_fallback
