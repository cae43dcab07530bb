"""Programs as users write them when they do not think of training, and what the policy answers them.

Neighbours: the rows in `abuse_rows/` say what becomes of them; the metrics and adapters of users stand there.
What is plain here, `predict`, `length`, `varied`, is for other tests of the client as well.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import dspy

from launcher.client import PolicyLM
from tests.support.small_run import Asked, answering

GOOD = "[[ ## french ## ]]\nbonjour\n\n[[ ## completed ## ]]"
BAD = "I would rather not"

Ask = Callable[..., dspy.Prediction]
Body = Callable[[Ask, str], Any]


def member(asked: Asked) -> int:
    """Which of its group's rollouts a request is; 0 for what is asked in validation or outside rollouts."""
    number = (asked.tag("rollout") or "").rpartition("-k")[2]
    return int(number) if number.isdecimal() else 0


def varied(asked: Asked) -> str:
    """An answer of another length for each rollout of a group."""
    return answering(french="mot" + "x" * member(asked))(asked)


def bad_for_the_first(asked: Asked) -> str:
    return BAD if member(asked) == 0 else varied(asked)


def length(example: dspy.Example, prediction: dspy.Prediction, trace: Any = None) -> float:
    return float(len(prediction.french))


def predict() -> dspy.Module:
    return dspy.Predict("english -> french")


class Program(dspy.Module):
    """Asks one predictor in the way of `body`."""

    def __init__(self, body: Body, signature: Any = "english -> french") -> None:
        super().__init__()
        self.ask = dspy.Predict(signature)
        self.body = body

    def forward(self, english: str) -> Any:
        return self.body(self.ask, english)


def of(body: Body) -> Callable[[], dspy.Module]:
    return lambda: Program(body)


# ----------------------------------------------------------------- bodies of `forward`


def tries_three_times(ask: Ask, english: str) -> dspy.Prediction:
    for _ in range(3):
        try:
            return ask(english=english)
        except Exception:  # noqa: BLE001 - programs are written so
            continue
    return dspy.Prediction(french="")


def raises(ask: Ask, english: str) -> dspy.Prediction:
    ask(english=english)
    raise ZeroDivisionError("as programs do")


def raises_sometimes(ask: Ask, english: str) -> dspy.Prediction:
    answer = ask(english=english)
    if answer.french == "mot":
        raise ZeroDivisionError("as programs do")
    return answer


def exits(ask: Ask, english: str) -> dspy.Prediction:
    ask(english=english)
    sys.exit(0)


def asks_nothing(ask: Ask, english: str) -> dspy.Prediction:
    return dspy.Prediction(french=english)


def asks_for_ever(ask: Ask, english: str) -> dspy.Prediction:
    answer = ask(english=english)
    while answer.french == "mot":
        answer = ask(english=english)
    return answer


def asks_for_ever_whatever_comes(ask: Ask, english: str) -> dspy.Prediction:
    answer = ask(english=english)
    while answer.french == "mot":
        try:
            ask(english=english)
        except:  # noqa: E722 - programs are written so
            continue
    return answer


def hangs(ask: Ask, english: str) -> dspy.Prediction:
    answer = ask(english=english)
    if answer.french == "mot":
        threading.Event().wait(20)
    return answer


def asks_from_its_own_threads(ask: Ask, english: str) -> dspy.Prediction:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(ask, english=english).result()


def asks_in_parallel(ask: Ask, english: str) -> dspy.Prediction:
    pairs = [(ask, dspy.Example(english=english).with_inputs("english"))] * 2
    return dspy.Parallel(num_threads=2, disable_progress_bar=True)(pairs)[0]


def asks_asyncified(ask: Ask, english: str) -> dspy.Prediction:
    return asyncio.run(dspy.asyncify(ask)(english=english))  # type: ignore[arg-type]


def asks_a_copy(ask: Any, english: str) -> dspy.Prediction:
    return ask.deepcopy()(english=english)


def asks_a_new_predictor(ask: Ask, english: str) -> dspy.Prediction:
    return dspy.Predict("english -> french")(english=english)


def asks_as_often_as_it_likes(ask: Ask, english: str) -> dspy.Prediction:
    answer = ask(english=english)
    for _ in range(len(answer.french) - len("mot")):
        ask(english=english)
    return answer


def returns_nothing(ask: Ask, english: str) -> None:
    ask(english=english)


def talks_of_the_past(ask: Any, english: str) -> dspy.Prediction:
    history = dspy.History(messages=[{"english": "one", "french": "un"}])
    return ask(english=english, history=history)


# ----------------------------------------------------------------- programs of another shape


class OnlyAsynchronous(dspy.Module):
    """Has `aforward` and no `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.ask = dspy.Predict("english -> french")

    async def aforward(self, english: str) -> dspy.Prediction:
        return await self.ask.acall(english=english)


class ForwardIsAsynchronous(OnlyAsynchronous):
    """`async def forward`: what it returns has to be awaited."""

    async def forward(self, english: str) -> dspy.Prediction:
        return await self.aforward(english)


class Two(dspy.Module):
    """`first`, then `second` on its answer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = dspy.Predict("english -> french")
        self.second = dspy.Predict("french -> english")

    def forward(self, english: str) -> dspy.Prediction:
        french = self.first(english=english).french
        return dspy.Prediction(french=french, back=self.second(french=french).english)


class SecondSometimes(Two):
    """Half of the runs ask `second`."""

    def forward(self, english: str) -> dspy.Prediction:
        french = self.first(english=english).french
        if len(french) > 4:
            self.second(french=french)
        return dspy.Prediction(french=french)


def two_answers(asked: Asked) -> str:
    if asked.tag("predictor") in ("second", None):
        return answering(english="hi")(asked)
    return varied(asked)


class Conversation(dspy.Signature):
    """Translate on."""

    english: str = dspy.InputField()
    history: dspy.History = dspy.InputField()
    french: str = dspy.OutputField()


class WithHistory(Program):
    """Hands a conversation on."""

    def __init__(self) -> None:
        super().__init__(talks_of_the_past, Conversation)


class WithFrozenPart(dspy.Module):
    """`part` was compiled by another optimizer before."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Program(lambda ask, english: ask(english=english))
        self.part._compiled = True
        self.last = dspy.Predict("french -> english")

    def forward(self, english: str) -> dspy.Prediction:
        french = self.part(english=english).french
        return dspy.Prediction(french=french, back=self.last(french=french).english)


def frozen_answers(asked: Asked) -> str:
    return answering(english="hi" + "x" * member(asked), french="mot")(asked)


def two_with_a_judge_of_the_base() -> dspy.Module:
    program = Two()
    program.first.lm = PolicyLM()
    program.second.lm = PolicyLM(model="base")
    return program


def two_with_another_model() -> dspy.Module:
    program = Two()
    program.first.lm = PolicyLM()
    program.second.lm = dspy.utils.DummyLM([{"english": "hi"}] * 100)
    return program


def with_demos() -> dspy.Module:
    program = dspy.Predict("english -> french")
    program.demos = [dspy.Example(english="cat", french="chat")]
    return program


def react() -> dspy.Module:
    def look(word: str) -> str:
        """Look a word up."""
        return f"{word}: a word"

    return dspy.ReAct("english -> french", tools=[look], max_iters=3)


def react_answers(asked: Asked) -> str:
    if asked.tag("predictor") != "react":
        return answering(reasoning="so", french="mot" + "x" * member(asked))(asked)
    tool = "finish" if asked.tag("call") == "1" else "look"
    arguments = "{}" if tool == "finish" else '{"word": "x"}'
    return answering(next_thought="hm", next_tool_name=tool, next_tool_args=arguments)(asked)


def best_of_three() -> dspy.Module:
    return dspy.BestOfN(predict(), N=3, reward_fn=lambda args, pred: 0.0, threshold=1.0)


def refined() -> dspy.Module:
    return dspy.Refine(predict(), N=2, reward_fn=lambda args, pred: 0.0, threshold=1.0)


def refined_answers(asked: Asked) -> str:
    if asked.tag("predictor") != "module":
        return answering(discussion="hm", advice='{"module": "try again"}')(asked)
    return varied(asked)


def bootstrapped() -> dspy.Module:
    """Prompts first: compiled by another optimizer, on the same endpoint."""
    data = [dspy.Example(english="cat", french="chat").with_inputs("english")]
    with dspy.context(lm=PolicyLM()):
        return dspy.BootstrapFewShot(metric=length, max_bootstrapped_demos=1).compile(
            predict(), trainset=data
        )


def copied() -> dspy.Module:
    program = predict()
    program.set_lm(PolicyLM())
    return program.deepcopy()


def at_temperature(temperature: float) -> Callable[[], dspy.Module]:
    def program() -> dspy.Module:
        program = predict()
        program.set_lm(PolicyLM(temperature=temperature))
        return program

    return program
