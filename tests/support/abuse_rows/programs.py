"""What programs do: how they ask, how they end, and which models they ask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dspy

from tests.support import abuses as a
from tests.support.abuse_rows.row import ALL, LENGTHS, Abuse
from tests.support.small_run import Asked, SmallRun


def first_try_bad(asked: Asked) -> str:
    return a.BAD if a.member(asked) == 0 and asked.tag("call") == "0" else a.varied(asked)


def empty_at_first(asked: Asked) -> str:
    return "" if a.member(asked) == 0 and asked.tag("call") == "0" else a.varied(asked)


def refused(code: str, message: str) -> Callable[[Asked], Any]:
    """The first of each group is refused with HTTP 400, as the gateway words it."""
    error = {"message": message, "type": "invalid_request_error", "param": "messages", "code": code}
    return lambda asked: (400, {"error": error}) if a.member(asked) == 0 else a.varied(asked)


def plain_lm(host: str) -> Callable[[SmallRun], dspy.LM]:
    return lambda run: dspy.LM("openai/policy", api_base=run.base_url.replace("127.0.0.1", host), api_key="x")


PROGRAMS = [
    Abuse(
        "swallows a parse error and asks again: the bad answer is penalised, the run scored",
        a.of(a.tries_three_times),
        answer=first_try_bad,
        outcomes=ALL,
        rewards={-1.0, *LENGTHS},
        counts={"samples": 10, "trained": 10},
    ),
    Abuse(
        "swallows the parse error of an empty answer, which no adapter reads",
        a.of(a.tries_three_times),
        answer=empty_at_first,
        outcomes=ALL,
        rewards={-1.0, *LENGTHS},
    ),
    *(
        Abuse(
            f"is refused what it asks ({code}): a failure of its own, neither lost nor left out",
            answer=refused(code, message),
            says=rf"a rollout ended crashed: \w+: .*{message}",
            outcomes={"crashed": 2, "scored": 6},
            rewards={0.0, *LENGTHS} - {3.0},
        )
        for code, message in [
            ("context_length_exceeded", "maximum context length is 8 tokens"),
            ("unsupported_content", "the policy reads text only"),
        ]
    ),
    Abuse(
        "asks what the engine fails at: that says nothing of the policy, so it is left out",
        answer=refused("request_failed", "the engine cannot answer this request, but still runs"),
        outcomes={"lost": 2, "scored": 6},
        rewards={None, *LENGTHS} - {3.0},
    ),
    Abuse(
        "raises always: its own exception, at once",
        a.of(a.raises),
        asked_for={"num_train_steps": 9},
        says=r"The program raised in every one of the 8 rollouts of its first step\n"
        r"ZeroDivisionError: as programs do \(tests/support/abuses\.py:\d+ in raises\)",
        outcomes={"crashed": 8},
        exit=6,
    ),
    Abuse(
        "raises sometimes: the failure score, said once, counted each time",
        a.of(a.raises_sometimes),
        asked_for={"failure_score": 0.5},
        says=r"a rollout ended crashed: ZeroDivisionError: as programs do",
        outcomes={"crashed": 2, "scored": 6},
        rewards={0.5, 4.0, 5.0, 6.0},
    ),
    Abuse(
        "calls sys.exit(0) in forward: it does not end the training as a success",
        a.of(a.exits),
        asked_for={"num_train_steps": 9},
        says=r"The program raised in every one of the 8 rollouts of its first step\nSystemExit: 0",
        outcomes={"crashed": 8},
        exit=6,
    ),
    Abuse(
        "never asks the policy",
        a.of(a.asks_nothing),
        asked_for={"num_train_steps": 9},
        says=r"Nothing could be trained in 3 steps in a row\nno rollout called the policy",
        counts={"rollouts_without_calls": 24, "empty_steps": 3},
        exit=6,
    ),
    Abuse(
        "never asks the policy, and there is only one step",
        a.of(a.asks_nothing),
        says=r"Nothing was trained in 1 step",
        exit=6,
    ),
    Abuse(
        "asks the policy for ever: stopped, and worth the failure score",
        a.of(a.asks_for_ever),
        asked_for={"rollout_calls": 5},
        says=r"a rollout ended crashed: it called the policy more than 5 times",
        outcomes={"crashed": 2, "scored": 6},
        rewards={0.0, 4.0, 5.0, 6.0},
        counts={"samples": 2 * 5 + 6},
    ),
    Abuse(
        "asks for ever and swallows whatever is raised: left behind, excluded",
        a.of(a.asks_for_ever_whatever_comes),
        asked_for={"rollout_calls": 5, "rollout_seconds": 5},
        says=r"a rollout ended overdue: no result within 5 s",
        outcomes={"overdue": 2, "scored": 6},
        rewards={None, 4.0, 5.0, 6.0},
    ),
    Abuse(
        "hangs sometimes, with one thread: the others still have their turn",
        a.of(a.hangs),
        asked_for={"num_threads": 1, "rollout_seconds": 5},
        outcomes={"overdue": 2, "scored": 6},
        rewards={None, 4.0, 5.0, 6.0},
        counts={"dropped": {"overdue: no result within 5 s": 2}},
    ),
    Abuse(
        "hangs sometimes, with 64 threads",
        a.of(a.hangs),
        asked_for={"num_threads": 64, "rollout_seconds": 5},
        outcomes={"overdue": 2, "scored": 6},
    ),
    Abuse(
        "hangs always: given up as soon as that is clear",
        a.of(a.hangs),
        answer=lambda asked: a.answering(french="mot")(asked),
        asked_for={"num_threads": 2, "rollout_seconds": 0.2},
        says=r"None of the step's 8 rollouts finished\nno result within 0.2 s",
        outcomes={"overdue": 8},
        exit=6,
    ),
    Abuse(
        "asks from threads of its own: not trained, and said how to",
        a.of(a.asks_from_its_own_threads),
        says=r"Nothing was trained in 1 step(.|\n)*8 calls came from threads the program started itself",
        counts={"calls_outside_rollouts": 8},
        exit=6,
    ),
    Abuse(
        "asks in dspy.Parallel: part of the rollout",
        a.of(a.asks_in_parallel),
        asked_for={"num_threads": 1},
        outcomes=ALL,
        counts={"samples": 16, "trained": 16},
    ),
    Abuse(
        "asks in dspy.asyncify: part of the rollout", a.of(a.asks_asyncified), outcomes=ALL, rewards=LENGTHS
    ),
    Abuse("has only aforward", a.OnlyAsynchronous, outcomes=ALL, rewards=LENGTHS),
    Abuse(
        "has only aforward, and answers that do not parse",
        a.OnlyAsynchronous,
        answer=a.bad_for_the_first,
        outcomes={"unparsed": 2, "scored": 6},
        rewards={-1.0, 4.0, 5.0, 6.0},
    ),
    Abuse("has an `async def forward`", a.ForwardIsAsynchronous, outcomes=ALL, rewards=LENGTHS),
    Abuse(
        "asks a copy of its predictor: trained under the predictor's name",
        a.of(a.asks_a_copy),
        outcomes=ALL,
        predictors={"ask"},
    ),
    Abuse(
        "asks a predictor it has just built: trained in a group of its own",
        a.of(a.asks_a_new_predictor),
        outcomes=ALL,
        predictors={"(other)"},
    ),
    Abuse(
        "asks as often as it likes: one member a rollout, all its calls",
        a.of(a.asks_as_often_as_it_likes),
        outcomes=ALL,
        rewards=LENGTHS,
        counts={"members": 8, "samples": 20, "trained": 20},
    ),
    Abuse(
        'asks as often as it likes, with "truncate": as many calls as each run made',
        a.of(a.asks_as_often_as_it_likes),
        asked_for={"variably_invoked_predictor_grouping_mode": "truncate"},
        rewards=LENGTHS,
        counts={"members": 8, "samples": 8, "trained": 8, "calls_truncated": 12},
    ),
    Abuse(
        "calls its second predictor only sometimes: its group has the runs that did",
        a.SecondSometimes,
        answer=a.two_answers,
        outcomes=ALL,
        predictors={"first", "second"},
        counts={"members": 8 + 4},
    ),
    Abuse(
        "returns nothing: the metric's exception says so",
        a.of(a.returns_nothing),
        asked_for={"num_train_steps": 9},
        says=r"no score 16 times in a row\nit raised AttributeError: 'NoneType'",
        exit=6,
    ),
    Abuse("keeps a conversation in dspy.History", a.WithHistory, outcomes=ALL, rewards=LENGTHS),
    Abuse(
        "is a ReAct agent: each turn is trained with the run's reward",
        a.react,
        answer=a.react_answers,
        outcomes=ALL,
        predictors={"react", "extract.predict"},
        counts={"samples": 8 * 3, "trained": 8 * 3},
    ),
    Abuse(
        "is wrapped in dspy.BestOfN: every attempt is trained with the reward of the best",
        a.best_of_three,
        outcomes=ALL,
        counts={"samples": 24, "trained": 24},
    ),
    Abuse(
        "is wrapped in dspy.Refine: its attempts and the advice it asks for are trained",
        a.refined,
        answer=a.refined_answers,
        outcomes=ALL,
        predictors={"module", "(other)"},
        counts={"samples": 8 * 3},
    ),
    Abuse(
        "asks for three answers at once, the second of which does not parse",
        lambda: dspy.Predict("english -> french", n=3),
        answer=lambda asked: a.BAD if asked.tag("call") == "1" else a.varied(asked),
        outcomes={"unparsed": 8},
        rewards={0.0, -1.0},
        counts={"samples": 24, "members": 24},
    ),
    Abuse(
        "has a part another optimizer compiled: it stays as it is, as everywhere in DSPy",
        a.WithFrozenPart,
        answer=a.frozen_answers,
        says=r"part.ask: inside an already compiled part",
        outcomes=ALL,
        predictors={"last"},
    ),
    Abuse(
        "has a predictor with another model: left alone",
        a.two_with_another_model,
        says=r"predictor 'second' uses 'dummy': it is not trained",
        predictors={"first"},
    ),
    Abuse(
        "asks the model before training as a judge: no sample of the policy",
        a.two_with_a_judge_of_the_base,
        answer=a.two_answers,
        says=r"predictor 'second' uses 'base'",
        predictors={"first"},
        counts={"samples": 8, "calls_outside_rollouts": 0},
    ),
    Abuse(
        "is a deep copy, made after set_lm: the copy is trained, and it is said which object",
        a.copied,
        says="training self of Predict, the given object itself",
        outcomes=ALL,
    ),
    Abuse("has no LM at all: the run's policy", outcomes=ALL, predictors={"self"}),
    Abuse(
        "configured a plain LM at the run's address, spelled localhost",
        a.of(a.asks_a_new_predictor),
        configured=plain_lm("localhost"),
        outcomes=ALL,
        predictors={"(other)"},
    ),
    Abuse(
        "configured a model that is not the run's",
        configured=lambda run: dspy.utils.DummyLM([]),
        says="no predictor of the program uses this run's policy",
        error=ValueError,
        exit=6,
    ),
    Abuse("is no program", lambda: print, says="must be a dspy.Module", error=TypeError, exit=6),
]
