"""Answers that do not parse, the adapters that parse them, and demos."""

from __future__ import annotations

from typing import Any

import dspy

from tests.support import abuses as a
from tests.support.abuse_rows.metrics import returning
from tests.support.abuse_rows.row import ALL, Abuse
from tests.support.small_run import CUT_OFF, Asked


class Plain(dspy.ChatAdapter):
    """A custom adapter: `french: …` on one line; raises what Python raises on anything else."""

    def parse(self, signature: type[dspy.Signature], completion: str) -> dict[str, Any]:
        name, value = completion.split(": ")
        return {name: value}


class Lenient(dspy.ChatAdapter):
    """A custom adapter that makes the best of what the strict parse refuses."""

    def parse(self, signature: type[dspy.Signature], completion: str) -> dict[str, Any]:
        try:
            return super().parse(signature, completion)
        except dspy.utils.exceptions.AdapterParseError:
            return {"french": completion}


class OwnWay(dspy.ChatAdapter):
    """A custom adapter that never calls parse()."""

    def __call__(
        self, lm: Any, lm_kwargs: Any, signature: Any, demos: Any, inputs: Any
    ) -> list[dict[str, Any]]:
        (text,) = lm(messages=self.format(signature, demos, inputs), **lm_kwargs)
        if "##" not in text:
            raise dspy.utils.exceptions.AdapterParseError("OwnWay", signature, text)
        return [{"french": text}]


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


def two_step() -> dspy.Adapter:
    """Its extraction model's first answer to each text does not parse: it is asked again, as JSON."""
    answers = [{"hm": "no idea"}, {"french": "mot"}] * 8
    return dspy.TwoStepAdapter(dspy.utils.DummyLM(answers, adapter=dspy.JSONAdapter()))


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
        adapter=Plain,
        answer=plain_for_most,
        outcomes={"unparsed": 2, "scored": 6},
        rewards={-1.0, 4.0, 5.0, 6.0},
        counts={"samples": 8},
    ),
    Abuse(
        "uses an adapter of its own that recovers from what the strict parse refuses",
        adapter=Lenient,
        answer=a.bad_for_the_first,
        outcomes=ALL,
        rewards={float(len(a.BAD)), 4.0, 5.0, 6.0},
    ),
    Abuse(
        "uses an adapter of its own that never calls parse()",
        adapter=OwnWay,
        answer=a.bad_for_the_first,
        outcomes={"unparsed": 2, "scored": 6},
        counts={"samples": 8},
    ),
    Abuse(
        "uses the two-step adapter: what its other model says in between is not the policy's",
        adapter=two_step,
        answer=lambda asked: "bonjour",
        asked_for={"num_threads": 1},
        metric=returning(1.0),
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
