"""The grammar to which an engine holds an answer, where the trainer can repeat it (C9).

vLLM sets the logits of tokens that the grammar does not allow next to minus infinity, before the softmax. So
a token's behaviour logprob is that of the allowed tokens alone, and the trainer needs the same mask. The
rules by which vLLM 0.32 makes a grammar of a request (`sampling_params.py`, `backend_xgrammar.py`) are here
for what both sides can do alike: a JSON schema, any JSON object, a regular expression, a choice among texts.
Neighbours: the gateway asks which samples can be trained and writes the grammars into the batch;
trainer/grammar_masks.py compiles them. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

_ANY_OBJECT = '{"type": "object"}'
_ESCAPED = {"\\": r"\\", '"': r"\"", "\n": r"\n", "\r": r"\r", "\t": r"\t"}
_FIRST_PRINTABLE, _DELETE = 0x20, 0x7F


@dataclass(frozen=True)
class Grammar:
    """`kind`: "json" (`text` is a schema), "regex" or "ebnf". `stop_token_ids`: those of the request, with
    which an answer may end as with the tokenizer's own end."""

    kind: str
    text: str
    stop_token_ids: tuple[int, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Its form in a batch's JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Grammar:
        """The inverse of `as_json`. Raises KeyError and TypeError."""
        return cls(found["kind"], found["text"], tuple(found["stop_token_ids"]))


def repeatable(settings: Mapping[str, Any]) -> Grammar | None:
    """The grammar of a request's sampling settings; None if it has none, or one that the trainer cannot
    repeat.

    With tools vLLM makes one grammar of the answer's form and of the calls; with `ignore_eos` an answer goes
    on after its grammar's end.
    """
    form, structured = settings.get("response_format"), settings.get("structured_outputs")
    if (form and structured) or settings.get("tools") or settings.get("ignore_eos"):
        return None
    found = _of_form(form) if isinstance(form, Mapping) else None
    if isinstance(structured, Mapping):
        found = _of_structured(structured)
    stops = settings.get("stop_token_ids") or ()
    if found is None or not all(type(stop) is int for stop in stops):
        return None
    return Grammar(*found, tuple(stops))


def _of_form(form: Mapping[str, Any]) -> tuple[str, str] | None:
    if form.get("type") == "json_object":
        return "json", _ANY_OBJECT
    described = form.get("json_schema")
    schema = described.get("schema") if isinstance(described, Mapping) else None
    if form.get("type") == "json_schema" and isinstance(schema, Mapping):
        return "json", json.dumps(schema)
    return None


def _of_structured(structured: Mapping[str, Any]) -> tuple[str, str] | None:
    """Of one constraint alone: what else vLLM takes there changes the grammar, or has no effect today."""
    given = {name: value for name, value in structured.items() if value is not None}
    if len(given) != 1:
        return None
    ((name, value),) = given.items()
    if name == "json":
        return ("json", value if isinstance(value, str) else json.dumps(value))
    if name == "json_object" and value is True:
        return "json", _ANY_OBJECT
    if name == "regex" and isinstance(value, str):
        return "regex", value
    if name == "choice" and isinstance(value, list) and all(isinstance(one, str) for one in value):
        return "ebnf", "root ::= " + " | ".join(f'"{_literal(one)}"' for one in value)
    return None


def _literal(text: str) -> str:
    """A text as a literal of EBNF."""
    return "".join(_ESCAPED.get(sign) or _plain(sign) for sign in text)


def _plain(sign: str) -> str:
    code = ord(sign)
    return f"\\u{code:04x}" if code < _FIRST_PRINTABLE or code == _DELETE else sign
