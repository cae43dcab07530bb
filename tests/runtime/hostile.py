"""Requests for the gateway's fuzz: valid ones, nearly valid ones, and hostile ones.

Every value of hostile_values.py is sent once; beyond them, combinations are drawn. Same seed, same requests.
"""

from __future__ import annotations

import itertools
import json
import random
import string
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from runtime.gateway.requests.request_fields import CHAT, COMPLETION
from tests.runtime import hostile_dialects as dialects
from tests.runtime import hostile_values as values

Cut = Literal["no", "in the body", "before the answer", "in the answer"]


@dataclass(frozen=True)
class Ask:
    """One request. `cut`: when the client hangs up."""

    path: str
    content: bytes
    headers: dict[str, str] = field(default_factory=dict)
    method: str = "POST"
    cut: Cut = "no"

    def __str__(self) -> str:
        shown = self.content
        if len(shown) > 700:
            shown = shown[:500] + b" ... " + shown[-150:]
        return f"{self.method} {self.path[:200]} {self.headers or ''} {shown.decode(errors='replace')}"


CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"
texts = st.one_of(st.sampled_from(values.TEXTS), st.text(max_size=12))
numbers = st.one_of(st.sampled_from(values.NUMBERS), st.integers(-3, 20), st.floats(-3, 3))
anything = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, texts),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
words = st.text(string.ascii_lowercase + " ", min_size=1, max_size=40)
plain_messages = st.lists(
    st.builds(
        lambda role, content: {"role": role, "content": content},
        st.sampled_from(["system", "user", "user", "assistant"]),
        words,
    ),
    min_size=1,
    max_size=3,
)
token_ids = st.lists(st.integers(3, 290), min_size=1, max_size=30)
plain_prompts: st.SearchStrategy[Any] = st.one_of(
    words, token_ids, st.lists(words, min_size=1, max_size=3), st.lists(token_ids, min_size=1, max_size=3)
)


def encoded(body: Any) -> bytes:
    """As Python's json writes it: NaN, Infinity and lone surrogates included."""
    return json.dumps(body).encode()


def usual(chat: bool, **more: Any) -> Ask:
    """A request that would be answered, but for `more`."""
    body: dict[str, Any] = {"model": "policy", "max_tokens": values.TOKENS, "temperature": 1.0}
    body |= {"messages": values.user("a black cat")} if chat else {"prompt": "the black cat"}
    return Ask(CHAT_PATH if chat else TEXT_PATH, encoded(body | more))


def each_value() -> Iterator[Ask]:
    """Every value of every field, alone; on both routes in turn where both have the field."""
    turn = itertools.cycle((True, False))
    for name, rule in sorted((CHAT | COMPLETION).items()):
        wrong = values.TYPES if rule.action == "pass" else values.TYPES[3:5]
        for value in [*values.TAKEN.get(name, ()), *values.EDGES.get(name, ()), *wrong]:
            chat = next(turn) if name in CHAT and name in COMPLETION else name in CHAT
            yield usual(chat, **{name: value})
    for together in values.TOGETHER:
        yield usual(not together.keys() <= COMPLETION.keys() or next(turn), **together)
    for model in values.ODD_MODELS:
        yield usual(next(turn), model=model)
    for content in values.RAW:
        yield Ask(TEXT_PATH if b'"prompt"' in content[:100] else CHAT_PATH, content)
    for headers in values.HEADERS:
        yield Ask(CHAT_PATH, usual(True).content, headers)
    for prefix in values.PREFIXES:
        yield Ask(prefix + CHAT_PATH, usual(True).content)


@st.composite
def combinations(draw: st.DrawFn) -> Ask:
    """A body with up to three fields as they should be; in two of three cases one or two that should not be
    so; now and then a client that hangs up."""
    chat = draw(st.booleans())
    rules = CHAT if chat else COMPLETION
    body: dict[str, Any] = {"max_tokens": values.TOKENS, "temperature": 1.0}
    body |= {"model": draw(st.sampled_from(values.MODELS))}
    body |= {"messages": draw(plain_messages)} if chat else {"prompt": draw(plain_prompts)}
    taken = [name for name in values.TAKEN if name in rules]
    for name in draw(st.lists(st.sampled_from(taken), max_size=3, unique=True)):
        body[name] = draw(st.sampled_from(values.TAKEN[name]))
    if draw(st.integers(0, 2)):
        for name in draw(st.lists(st.sampled_from(sorted(rules)), min_size=1, max_size=2, unique=True)):
            edges = values.EDGES.get(name)
            body[name] = draw(st.one_of(st.sampled_from(edges), anything) if edges else anything)
    cuts: tuple[Cut, ...] = ("in the body", "before the answer", "in the answer")
    cut: Cut = draw(st.sampled_from(cuts)) if draw(st.integers(0, 9)) == 0 else "no"
    return Ask(CHAT_PATH if chat else TEXT_PATH, encoded(body), cut=cut)


rollouts = st.sampled_from([f"r{index}" for index in range(1, 9)])
client_states = st.one_of(st.dictionaries(texts, anything, max_size=3), st.sampled_from(values.STATES))
# Taken in where the rollout has samples left: the key and the program's state are what is odd.
usual_steps = st.fixed_dictionaries(
    {
        "key": texts.filter(bool),
        "groups": rollouts.map(lambda name: [{"id": "g", "members": [{"rollout": name, "reward": 1.0}]}]),
        "client_state": client_states,
    }
)
odd_members = st.fixed_dictionaries(
    {},
    optional={
        "rollout": st.one_of(rollouts, anything),
        "reward": st.one_of(numbers, anything),
        "failure": anything,
        "call": numbers,
        "predictor": texts,
        "unknown": anything,
    },
)
odd_groups = st.fixed_dictionaries(
    {},
    optional={
        "id": st.one_of(st.just("g"), anything),
        "predictor": anything,
        "members": st.lists(odd_members, max_size=3),
    },
)
odd_steps = st.fixed_dictionaries(
    {},
    optional={
        "key": st.one_of(st.sampled_from(["k", "", "k" * 129, "../k", "\ud800", None, 3]), anything),
        "groups": st.one_of(st.lists(odd_groups, max_size=3), anything),
        "client_state": st.one_of(client_states, anything),
        "unknown": anything,
    },
)


@st.composite
def training_calls(draw: st.DrawFn) -> Ask:
    """One call of a training route, or of what is near one."""
    name, digits = draw(st.sampled_from(values.NAMES)), draw(st.sampled_from(values.DIGITS))
    if draw(st.booleans()):
        raw = st.sampled_from([content for content in values.RAW if len(content) < 10_000])
        return Ask("/slipway/steps", draw(st.one_of(st.one_of(odd_steps, usual_steps).map(encoded), raw)))
    method, path = draw(
        st.sampled_from(
            [
                ("GET", f"/slipway/steps/{digits}?wait=0"),
                ("GET", f"/slipway/steps/1?wait={digits}"),
                ("POST", f"/slipway/checkpoints/{name}/pin"),
                ("POST", f"/slipway/checkpoints/{name}/restore"),
                ("GET", f"/slipway/checkpoints/{name}"),
                ("GET", f"/slipway/metrics?after={digits}"),
                ("PUT", "/slipway/lease"),
                ("DELETE", "/slipway/lease"),
                ("PUT", f"/slipway/{name}"),
                ("GET", f"/slipway/{name}/{digits}"),
                ("POST", f"/{name}"),
                ("PATCH", "/slipway/steps/1"),
            ]
        )
    )
    return Ask(path, encoded({"key": "k"}) if method == "POST" else b"", method=method)


def drawn(kind: st.SearchStrategy[Ask], count: int, number: int) -> list[Ask]:
    """`count` requests drawn with the seed `number`."""
    found: list[Ask] = []

    @seed(number)
    @settings(
        max_examples=count,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(kind)
    def collect(ask: Ask) -> None:
        found.append(ask)

    collect()
    return found[:count]


# A chat request's field in the dialects' words.
_RESPONSES_WORDS = {"messages": "input", "max_tokens": "max_output_tokens"}
_MESSAGES_WORDS = {"stop": "stop_sequences"}


def in_other_dialects(ask: Ask) -> Iterator[Ask]:
    """A chat request's fields, as they are, in a request of each other dialect; a completion's as settings
    for sampling."""
    if ask.path != CHAT_PATH:
        yield _with_settings(ask)
        return
    for path, words in (("/v1/responses", _RESPONSES_WORDS), ("/v1/messages", _MESSAGES_WORDS)):
        try:
            body = json.loads(ask.content)
            content = encoded({words.get(name, name): value for name, value in body.items()})
        except (ValueError, AttributeError, RecursionError):
            content = ask.content
        yield Ask(path, content, ask.headers, cut=ask.cut)


def _with_settings(ask: Ask) -> Ask:
    path = "/inference/v1/generate"
    try:
        body = json.loads(ask.content)
        settings = {name: value for name, value in body.items() if name not in ("model", "prompt", "stream")}
        outside = {name: body[name] for name in ("model", "stream") if name in body}
        content = encoded({"token_ids": body.get("prompt"), "sampling_params": settings, **outside})
    except (ValueError, AttributeError, RecursionError):
        content = ask.content
    return Ask(path, content, ask.headers, cut=ask.cut)


def of_other_dialects() -> Iterator[Ask]:
    """Every field that a dialect has of its own, with what stands in such fields and what does not."""
    for path, fields in dialects.DIALECTS.items():
        for name, own in fields.items():
            for value in [*own, *values.TYPES]:
                yield Ask(path, encoded(dialects.USUAL[path] | {name: value}))


def dialect_asks(count: int, number: int) -> list[Ask]:
    """`count` requests of the other dialects: each value once, the rest drawn; in a drawn order."""
    found = [*of_other_dialects()]
    found += [other for ask in each_value() for other in in_other_dialects(ask)]
    drawn_ones = drawn(combinations(), max(count - len(found), 1), number)
    found += [other for ask in drawn_ones for other in in_other_dialects(ask)]
    random.Random(number).shuffle(found)
    return found[:count]


def asks(count: int, number: int) -> list[Ask]:
    """`count` completion requests: each value once, the rest drawn; in a drawn order."""
    each = list(each_value())
    found = each + drawn(combinations(), count - len(each), number)
    random.Random(number).shuffle(found)
    return found
