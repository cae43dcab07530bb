"""What users do to an optimizer, and what happens: the table reads as the documentation of it.

Each row is run for real against a small endpoint that speaks our routes. `says` is looked for in what the
terminal and the exception say; `outcomes` is what became of the rollouts; `rewards` what was sent for them,
None for a rollout that is excluded and counted. `exit` is `launch`'s: 6 when the program dies of it.
"""

from __future__ import annotations

import inspect
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import dspy
import numpy as np
import pytest
from dspy.teleprompt import grpo as dspys

from launcher.client import GRPO, EndpointLost, PolicyLM, StepFailed, TrainingFailed, connect
from launcher.client.wire import Patience
from tests.support import abuses as a
from tests.support.small_run import CUT_OFF, TOKEN, Asked, SmallRun

# Two examples and four rollouts of each; the answers are `mot`, `motx`, `motxx` and `motxxx`.
ALL = {"scored": 8}
LENGTHS = {3.0, 4.0, 5.0, 6.0}


@dataclass(frozen=True)
class Abuse:
    """One row of the table."""

    did: str
    program: Callable[[], Any] = a.predict
    metric: Callable[..., Any] = a.length
    answer: Callable[[Asked], Any] = a.varied
    adapter: Callable[[], dspy.Adapter] | None = None
    configured: Callable[[SmallRun], Any] | None = None
    trainset: Any = None
    valset: Any = None
    asked_for: Mapping[str, Any] = field(default_factory=dict)
    before: Callable[[SmallRun], None] = lambda run: None
    says: str = ""
    outcomes: Mapping[str, int] | None = None
    rewards: set[float | None] | None = None
    predictors: set[str] | None = None
    counts: Mapping[str, Any] = field(default_factory=dict)
    exit: int = 0
    error: type[Exception] = TrainingFailed


def bad_for_the_first(asked: Asked) -> str:
    return a.BAD if a.member(asked) == 0 else a.varied(asked)


def first_try_bad(asked: Asked) -> str:
    return a.BAD if a.member(asked) == 0 and asked.tag("call") == "0" else a.varied(asked)


def empty_at_first(asked: Asked) -> str:
    return "" if a.member(asked) == 0 and asked.tag("call") == "0" else a.varied(asked)


def refused(code: str, message: str) -> Callable[[Asked], Any]:
    """The first of each group is refused with HTTP 400, as the gateway words it."""
    error = {"message": message, "type": "invalid_request_error", "param": "messages", "code": code}
    return lambda asked: (400, {"error": error}) if a.member(asked) == 0 else a.varied(asked)


def half_an_answer(asked: Asked) -> str:
    return (
        "[[ ## reasoning ## ]]\nso"
        if a.member(asked) == 0
        else a.answering(reasoning="so", french="m")(asked)
    )


def json_for_most(asked: Asked) -> str:
    return a.BAD if a.member(asked) == 0 else f'{{"french": "mot{"x" * a.member(asked)}"}}'


def xml_for_most(asked: Asked) -> str:
    return a.BAD if a.member(asked) == 0 else f"<french>mot{'x' * a.member(asked)}</french>"


def plain_for_most(asked: Asked) -> str:
    return a.BAD if a.member(asked) == 0 else f"french: mot{'x' * a.member(asked)}"


def same(asked: Asked) -> str:
    return a.GOOD


def two_step() -> dspy.Adapter:
    """Its extraction model's first answer to each text does not parse: it is asked again, as JSON."""
    answers = [{"hm": "no idea"}, {"french": "mot"}] * 8
    return dspy.TwoStepAdapter(dspy.utils.DummyLM(answers, adapter=dspy.JSONAdapter()))


def tagged_examples() -> list[dspy.Example]:
    return [dspy.Example(english=f"word {i}", french="mot", tags=[]).with_inputs("english") for i in range(2)]


def plain_lm(host: str) -> Callable[[SmallRun], dspy.LM]:
    return lambda run: dspy.LM("openai/policy", api_base=run.base_url.replace("127.0.0.1", host), api_key="x")


def away_after_a_step(run: SmallRun) -> None:
    """The endpoint goes in the middle of the second step's rollouts, for good."""

    def answer(asked: Asked) -> str:
        if run.requests:
            run.go()
        return a.varied(asked)

    run.answer = answer


def fails_the_step(run: SmallRun) -> None:
    run.fail_step = "out of memory"


def drops_flat(run: SmallRun) -> None:
    run.drop_flat = True


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
        "raises always: three steps, then its own exception",
        a.of(a.raises),
        asked_for={"num_train_steps": 9},
        says=r"The program raised in every rollout of 3 steps in a row\nZeroDivisionError: as programs do",
        outcomes={"crashed": 24},
        rewards={0.0},
        exit=6,
    ),
    Abuse(
        "raises always, and there is only one step",
        a.of(a.raises),
        before=drops_flat,
        says=r"Nothing was trained in 1 step\n"
        r"rollouts: 8 crashed; samples left out: 8 no variance in its group",
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
        says=r"The program raised in every rollout of 3 steps in a row\nSystemExit: 0",
        outcomes={"crashed": 24},
        exit=6,
    ),
    Abuse(
        "never asks the policy",
        a.of(a.asks_nothing),
        asked_for={"num_train_steps": 9},
        says=r"3 steps in a row had nothing to train on\nno rollout called the policy",
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
        asked_for={"rollout_calls": 5, "rollout_seconds": 2},
        says=r"a rollout ended overdue: no result within 2 s",
        outcomes={"overdue": 2, "scored": 6},
        rewards={None, 4.0, 5.0, 6.0},
    ),
    Abuse(
        "hangs sometimes, with one thread: the others still have their turn",
        a.of(a.hangs),
        asked_for={"num_threads": 1, "rollout_seconds": 2},
        outcomes={"overdue": 2, "scored": 6},
        rewards={None, 4.0, 5.0, 6.0},
        counts={"dropped": {"overdue: no result within 2 s": 2}},
    ),
    Abuse(
        "hangs sometimes, with 64 threads",
        a.of(a.hangs),
        asked_for={"num_threads": 64, "rollout_seconds": 2},
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
        answer=bad_for_the_first,
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


PARSES = [
    Abuse(
        "answers that never parse: format failures of the tokens that were sampled, none dropped",
        answer=lambda asked: a.BAD,
        outcomes={"unparsed": 8},
        rewards={-1.0},
        counts={"samples": 8, "dropped": {}},
    ),
    Abuse(
        "answers that parse in part: scored, not padded with copies",
        lambda: dspy.Predict("english -> reasoning, french"),
        answer=half_an_answer,
        outcomes={"unparsed": 2, "scored": 6},
        rewards={-1.0, 1.0},
        counts={"samples": 8, "members": 8},
    ),
    Abuse(
        "answers cut off at their limit: format failures, though they parse",
        answer=lambda asked: (
            a.varied(asked).partition("\n\n")[0] + CUT_OFF if a.member(asked) == 0 else a.varied(asked)
        ),
        outcomes=ALL,
        rewards={-1.0, 4.0, 5.0, 6.0},
    ),
    Abuse(
        "uses the JSON adapter",
        adapter=dspy.JSONAdapter,
        answer=json_for_most,
        outcomes={"unparsed": 2, "scored": 6},
        rewards={-1.0, 4.0, 5.0, 6.0},
        counts={"samples": 8},
    ),
    Abuse(
        "uses the XML adapter",
        adapter=dspy.XMLAdapter,
        answer=xml_for_most,
        outcomes={"unparsed": 2, "scored": 6},
        rewards={-1.0, 4.0, 5.0, 6.0},
        counts={"samples": 8},
    ),
    Abuse(
        "uses an adapter of its own, whose parse() raises a bare ValueError",
        adapter=a.Plain,
        answer=plain_for_most,
        outcomes={"unparsed": 2, "scored": 6},
        rewards={-1.0, 4.0, 5.0, 6.0},
        counts={"samples": 8},
    ),
    Abuse(
        "uses an adapter of its own that recovers from what the strict parse refuses",
        adapter=a.Lenient,
        answer=bad_for_the_first,
        outcomes=ALL,
        rewards={float(len(a.BAD)), 4.0, 5.0, 6.0},
    ),
    Abuse(
        "uses an adapter of its own that never calls parse()",
        adapter=a.OwnWay,
        answer=bad_for_the_first,
        outcomes={"unparsed": 2, "scored": 6},
        counts={"samples": 8},
    ),
    Abuse(
        "uses the two-step adapter: what its other model says in between is not the policy's",
        adapter=two_step,
        answer=lambda asked: "bonjour",
        asked_for={"num_threads": 1},
        metric=a.returning(1.0),
        outcomes=ALL,
        rewards={1.0},
        counts={"samples": 8},
    ),
    Abuse(
        "was compiled with demos: they stay in the prompt that is trained",
        a.with_demos,
        says="1 demos stay in its prompts and in what is trained",
        outcomes=ALL,
    ),
    Abuse(
        "was compiled by BootstrapFewShot on the same endpoint: prompts first, weights second",
        a.bootstrapped,
        says="1 demos stay in its prompts and in what is trained",
        outcomes=ALL,
    ),
    Abuse(
        "was compiled with demos, and asks for exclude_demos",
        a.with_demos,
        asked_for={"exclude_demos": True},
        says="1 demos were removed",
        outcomes=ALL,
    ),
]

METRICS = [
    Abuse(
        "raises always",
        metric=a.raising(KeyError("no such column")),
        asked_for={"num_train_steps": 9},
        says=r"The metric gave no score 16 times in a row\n"
        r"it raised KeyError: 'no such column'\nHint: the last failure was on Example",
        exit=6,
    ),
    Abuse(
        "raises always, with fewer rollouts than make it sure",
        metric=a.raising(KeyError("no such column")),
        says=r"Nothing was trained in 1 step\n"
        r"rollouts: 8 unscored; samples left out: 8 unscored: the metric raised KeyError"
        r"(.|\n)*step 1 trained nothing: no sample of this step can be trained",
        outcomes={"unscored": 8},
        exit=6,
    ),
    Abuse(
        "raises on every validation example",
        metric=a.raising(KeyError("no such column")),
        valset=tagged_examples,
        says=r"The metric scored none of the 2 validation examples\nthe metric raised KeyError",
        exit=6,
    ),
    Abuse(
        "calls sys.exit",
        metric=a.raising(SystemExit(0)),
        asked_for={"num_train_steps": 9},
        says=r"it raised SystemExit: 0",
        exit=6,
    ),
    Abuse("returns None", metric=a.returning(None), says="the metric returned None", exit=6),
    Abuse("returns NaN", metric=a.returning(float("nan")), says="the metric returned nan", exit=6),
    Abuse("returns infinity", metric=a.returning(float("inf")), says="the metric returned inf", exit=6),
    Abuse("returns more than a reward can hold", metric=a.returning(1e300), says=r"returned 1e\+300", exit=6),
    Abuse("returns a text", metric=a.returning("good"), says="returned str, not a number", exit=6),
    Abuse("returns a number as text", metric=a.returning("0.5"), says="returned str, not a number", exit=6),
    Abuse("returns a dict", metric=a.returning({"score": 1}), says="returned dict, not a number", exit=6),
    Abuse(
        "returns a Prediction without a score",
        metric=a.returning(dspy.Prediction(feedback="hm")),
        says="returned a Prediction without a score",
        exit=6,
    ),
    Abuse("returns a bool", metric=lambda e, p, trace=None: len(p.french) > 4, rewards={0.0, 1.0}),
    Abuse("returns an int", metric=lambda e, p, trace=None: len(p.french), rewards=LENGTHS),
    Abuse("returns a numpy float", metric=lambda e, p, t=None: np.float32(len(p.french)), rewards=LENGTHS),
    Abuse(
        "returns a numpy bool", metric=lambda e, p, t=None: np.bool_(len(p.french) > 4), rewards={0.0, 1.0}
    ),
    Abuse(
        "returns a Prediction with score and feedback",
        metric=lambda e, p, trace=None: dspy.Prediction(score=len(p.french), feedback="well done"),
        rewards=LENGTHS,
    ),
    Abuse("takes two arguments", metric=lambda e, p: len(p.french), rewards=LENGTHS),
    Abuse("takes GEPA's five arguments", metric=lambda g, p, t, n, nt: len(p.french), rewards=LENGTHS),
    Abuse("takes any arguments", metric=lambda *words: len(words[1].french), rewards=LENGTHS),
    Abuse("is asynchronous", metric=a.asynchronous, rewards=LENGTHS),
    Abuse("is a module, as dspy.evaluate's are", metric=a.Judge(), rewards=LENGTHS),
    Abuse(
        "takes one argument",
        metric=lambda prediction: 1.0,
        says="must take \\(example, prediction, trace=None\\)",
        error=TypeError,
        exit=6,
    ),
    Abuse("is no function", metric="exact", says="is not a function", error=TypeError, exit=6),  # type: ignore[arg-type]
    Abuse(
        "is slow for some: those runs are excluded, not zero",
        metric=a.slow_for_some,
        asked_for={"rollout_seconds": 2},
        says="the metric gave no score within 2 s",
        outcomes={"overdue": 2, "scored": 6},
        rewards={None, 4.0, 5.0, 6.0},
    ),
    Abuse(
        "writes into the example: into its own copy",
        metric=a.writes_into_the_example,
        trainset=tagged_examples,
        rewards={13.0, 14.0, 15.0, 16.0},
    ),
    Abuse(
        "judges a predictor the program does not have",
        metric=lambda e, p, t=None: dspy.Prediction(score=len(p.french), predictor_scores={"frist": 1.0}),
        says="scores a predictor 'frist', which the program does not have; it has self",
        rewards=LENGTHS,
    ),
]

DATA = [
    Abuse("an empty trainset", trainset=list, says="the trainset is empty", error=ValueError, exit=6),
    Abuse(
        "dicts instead of examples",
        trainset=lambda: [{"english": "hi"}],
        says=r"trainset\[0\] is a dict, not a dspy.Example",
        error=TypeError,
        exit=6,
    ),
    Abuse(
        "examples without inputs",
        trainset=lambda: [dspy.Example(english="hi")],
        says=r"trainset\[0\] does not say which fields are inputs",
        error=ValueError,
        exit=6,
    ),
    Abuse(
        "examples whose inputs they do not have",
        trainset=lambda: [dspy.Example(english="hi").with_inputs("englisch")],
        says=r"trainset\[0\] has no input",
        error=ValueError,
        exit=6,
    ),
    Abuse(
        "no list at all", trainset=lambda: 5, says="must be a list of dspy.Example", error=TypeError, exit=6
    ),
    Abuse("a generator", trainset=lambda: (it for it in tagged_examples()), outcomes=ALL),
    Abuse(
        "one example where a step takes two: two groups of it",
        trainset=lambda: tagged_examples()[:1],
        says="a step takes 2 examples and the trainset has 1",
        outcomes=ALL,
        counts={"groups": 2},
    ),
    Abuse(
        "the same example twice",
        trainset=lambda: tagged_examples()[:1] * 2,
        says="1 of the 2 training examples are in the trainset more than once",
        outcomes=ALL,
    ),
    Abuse(
        "a valset that is the trainset",
        trainset=tagged_examples,
        valset=tagged_examples,
        says="2 of the 2 validation examples are training examples too",
        outcomes=ALL,
    ),
    Abuse("an empty valset: nothing is validated", valset=list, outcomes=ALL),
]

NOTHING_TO_LEARN = [
    Abuse(
        "every answer is worth the same: the training fails, as it taught nothing",
        answer=same,
        before=drops_flat,
        asked_for={"num_train_steps": 2},
        says=r"Nothing was trained in 2 steps\n"
        r"rollouts: 16 scored; samples left out: 16 no variance in its group",
        counts={"groups_without_variance": 4},
        exit=6,
    ),
    Abuse(
        "one example is worth the same throughout: its group is left out and counted",
        answer=lambda asked: same(asked) if "word 0" in asked.user else a.varied(asked),
        before=drops_flat,
        counts={"groups_without_variance": 1, "trained": 4, "dropped": {"no variance in its group": 4}},
    ),
]

RUN = [
    Abuse(
        "goes away for good in the middle of a step",
        before=away_after_a_step,
        asked_for={"num_train_steps": 50, "num_threads": 2},
        says=r"None of the step's 8 rollouts got an answer\nNo answer from the run",
        outcomes={"scored": 8, "lost": 8},
        counts={"steps": 1},
        error=EndpointLost,
        exit=6,
    ),
    Abuse(
        "fails a training step",
        before=fails_the_step,
        asked_for={"num_train_steps": 50},
        says=r"Step 1 failed\nout of memory\nHint: the policy before it is still served",
        outcomes=ALL,
        error=StepFailed,
        exit=6,
    ),
    Abuse(
        "refuses each step, as nothing in it can be trained",
        metric=lambda e, p, t=None: None if len(e.english) else 1.0,
        asked_for={
            "num_train_steps": 50,
            "num_rollouts_per_grpo_step": 2,
            "num_dspy_examples_per_grpo_step": 1,
        },
        says=r"3 steps in a row had nothing to train on\nno sample of this step can be trained"
        r"(.|\n)*the last rollouts ended like this: 2 unscored",
        counts={"empty_steps": 3, "dropped": {"unscored: the metric returned None": 6}},
        exit=6,
    ),
]

PARAMETERS = [
    Abuse(f"{name}={value!r}", asked_for={name: value}, says=says, error=ValueError, exit=6)
    for name, value, says in [
        ("num_train_steps", 0, "num_train_steps must be at least 1"),
        ("num_train_steps", "10", "num_train_steps must be a whole number, not '10'"),
        ("num_threads", True, "num_threads must be a whole number, not True"),
        ("num_rollouts_per_grpo_step", 1, "must be at least 2: a rollout is compared with the others"),
        ("seed", 0.5, "seed must be a whole number"),
        ("rollout_seconds", 0, "rollout_seconds must be above 0"),
        ("rollout_calls", 0, "rollout_calls must be at least 1"),
        ("failure_score", float("nan"), "failure_score must be a number"),
        ("format_failure_score", 0.0, "format_failure_score must be below failure_score"),
        ("checkpoint", "every", "checkpoint must be 'single-best' or 'improvements' or 'none', not 'every'"),
        ("staleness", -1, "staleness must be at least 0"),
        ("on_alarm", "pause", "on_alarm must be 'note' or 'stop'"),
        ("alarms", {"lenght": 3.0}, "there is no threshold 'lenght'; there are window, flat_groups, length"),
        ("alarms", {"length": 0}, "length must be a number above 0"),
        ("multitask", False, "one policy is trained for all predictors"),
        (
            "variably_invoked_predictor_grouping_mode",
            "fill",
            '"fill" would train copies of one sample as if they were several',
        ),
        ("variably_invoked_predictor_fill_strategy", "max", "belongs to the grouping mode 'fill'"),
        ("train_kwargs", {"top_p": 0.9}, "samples from a different distribution than the policy's"),
        ("train_kwargs", {"temperature": 0}, "temperature must be above 0 and at most 2"),
    ]
] + [
    Abuse(
        "an adapter for each LM, as dspy.GRPO takes",
        asked_for={"adapter": {None: dspy.ChatAdapter()}},
        says="adapter must be a dspy.Adapter, not a dict: there is one policy",
        error=TypeError,
        exit=6,
    ),
    Abuse(
        "train_kwargs for each of something that is no LM",
        asked_for={"train_kwargs": {1: {"temperature": 1.0}}},
        says="train_kwargs must map names to values, or each LM of the policy to such a mapping",
        error=TypeError,
        exit=6,
    ),
    Abuse(
        "train_kwargs that the run does not know, or cannot follow",
        asked_for={"train_kwargs": {"lerning_rate": 1e-5, "lora_config": {"r": 8}}},
        says="lora_config.r: 8 is asked for, this run has 16; lerning_rate: it is not known here; did you "
        "mean learning_rate?",
        error=TrainingFailed,
        exit=6,
    ),
    Abuse(
        "a temperature that is not the LM's",
        a.at_temperature(0.2),
        asked_for={"train_kwargs": {"temperature": 0.8}},
        says="temperature=0.8, but the program's LM has temperature=0.2",
        error=ValueError,
        exit=6,
    ),
    Abuse(
        "no temperature, where the LM has one: the rollouts' own is said",
        a.at_temperature(0.2),
        says="rollouts sample at temperature 1, not the LM's 0.2",
        outcomes=ALL,
    ),
    Abuse(
        "what ArborGRPO wants said of the sampling, where it is neutral",
        asked_for={
            "train_kwargs": {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0},
            "exclude_demos": True,
            "multitask": True,
        },
        outcomes=ALL,
    ),
]

TABLE = {
    "a program that": PROGRAMS,
    "a program whose answers, adapter or demos:": PARSES,
    "a metric that": METRICS,
    "as data,": DATA,
    "rewards:": NOTHING_TO_LEARN,
    "a run that": RUN,
    "as parameter,": PARAMETERS,
}
ROWS = [pytest.param(row, id=f"{what} {row.did}") for what, rows in TABLE.items() for row in rows]


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("row", ROWS)
def test_abuse(row: Abuse, run: SmallRun, capfd: pytest.CaptureFixture[str]) -> None:
    run.answer = row.answer
    row.before(run)
    session = connect(run.base_url, TOKEN, Patience(answer_seconds=30.0, away_seconds=0.3))
    lm = row.configured(run) if row.configured else None
    grpo, error, said, began = None, None, "", time.monotonic()
    with dspy.context(lm=lm) if lm is not None else nullcontext():
        try:
            grpo = GRPO(row.metric, session=session, **{**DEFAULTS, **row.asked_for, **_adapter(row)})
            grpo.compile(
                row.program(), trainset=_data(row.trainset or tagged_examples), valset=_data(row.valset)
            )
        except Exception as raised:  # noqa: BLE001 - which one it is, is what the table says
            error, said = raised, str(raised)
    assert time.monotonic() - began < BOUND_SECONDS
    said += capfd.readouterr().err
    assert (error is None) == (row.exit == 0), error
    assert error is None or type(error) is row.error, repr(error)
    assert re.search(row.says, said), said
    if grpo is not None:
        _check_report(row, run, grpo)


# Many times what any row takes: each of them would go on for ever if it were not bounded.
BOUND_SECONDS = 60

DEFAULTS = {
    "num_train_steps": 1,
    "num_dspy_examples_per_grpo_step": 2,
    "num_rollouts_per_grpo_step": 4,
    "checkpoint": "none",
}


def _adapter(row: Abuse) -> dict[str, Any]:
    return {"adapter": row.adapter()} if row.adapter else {}


def _data(given: Any) -> Any:
    return given() if given is not None else None


def _check_report(row: Abuse, run: SmallRun, grpo: GRPO) -> None:
    report = grpo.report.to_dict()
    if row.outcomes is not None:
        assert report["outcomes"] == row.outcomes
    assert {name: report[name] for name in row.counts} == row.counts
    assert report["trained"] + sum(report["dropped"].values()) >= report["samples"]
    groups = [group for request in run.requests.values() for group in request.groups]
    if row.rewards is not None:
        assert {it.reward for group in groups for it in group.members} == row.rewards
    if row.predictors is not None:
        assert {group.predictor for group in groups} == row.predictors


ARBOR = (
    "metric train_kwargs adapter exclude_demos num_threads num_train_steps seed "
    "num_dspy_examples_per_grpo_step num_rollouts_per_grpo_step use_train_as_val num_steps_for_val "
    "report_train_scores failure_score format_failure_score variably_invoked_predictor_grouping_mode "
    "variably_invoked_predictor_fill_strategy checkpoint"
)


def test_every_parameter_of_dspys_and_arbors_optimizers_is_known_here() -> None:
    ours = set(inspect.signature(GRPO.__init__).parameters)
    assert set(inspect.signature(dspys.GRPO.__init__).parameters) <= ours
    assert set(ARBOR.split()) <= ours


def test_the_student_may_be_named_as_its_own_teacher_and_nobody_else(run: SmallRun) -> None:
    run.answer = a.varied
    for teacher in (None, [], "itself", ["itself"]):
        student = a.predict()
        named = [student] if teacher == ["itself"] else student if teacher == "itself" else teacher
        GRPO(a.length, **DEFAULTS).compile(student, tagged_examples(), named)
    with pytest.raises(ValueError, match="it takes no teacher"):
        GRPO(a.length, **DEFAULTS).compile(a.predict(), tagged_examples(), [a.predict()])


def test_a_program_that_asks_another_run_is_refused(run: SmallRun) -> None:
    other = SmallRun()
    student = a.predict()
    student.set_lm(PolicyLM(other.session()))
    with pytest.raises(ValueError, match="but the optimizer trains the run at"):
        GRPO(a.length, **DEFAULTS).compile(student, tagged_examples())
    other.close()


def test_the_table_is_long_and_has_no_row_twice() -> None:
    ids = Counter(str(row.id) for row in ROWS)
    assert max(ids.values()) == 1
    assert len(ROWS) > 100
