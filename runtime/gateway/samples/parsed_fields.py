"""The names of an exchange by the fields of a DSPy task, for clients that train another text than sampled.

DSPy's own GRPO samples with the chat adapter (`[[ ## answer ## ]]`) and trains what it had parsed, written
again by the XML adapter (`<answer>`): literally the two never match. Here both have one name: the task, the
question, and the values of the outputs, by the field names in the system message. Field names in an answer or
an input do not count.
Neighbours: signature.py reads the system message, field_values.py the values; field_index.py finds samples by
these names. Pure, and bounded: a text that is too long, too deep or of no adapter has no name.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.gateway.samples import field_values, signature
from runtime.gateway.samples.signature import Signature

# Longer exchanges have no name.
MAX_CHARACTERS = 400_000
# So many places of an answer are tried for a JSON object, and so many characters read at that.
_MAX_TRIES = 2_000
_MAX_READ = 4_000_000
_KEY_BYTES = 16
_THOUGHTS = re.compile(
    r"\A\s*<(?:think|thinking|budget:thinking)>.*?</(?:think|thinking|budget:thinking)>", re.DOTALL
)
_BRACES = re.compile(r"[{}]")
_HEADER = re.compile(r"\[\[ ## (\w+) ## \]\]")

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Names:
    """The names of an exchange.

    `parsed`: by the values of its outputs; None if some are missing. `exact`: by the answer's own text, which
    is trained if it could not be parsed. Both also without the turns before the question, for clients that
    train no demonstrations. `raw`: by the answer's text to any question; then `inputs` must be compared.
    `object`: by the answer as the piece in braces that the JSON adapter shows in place of an answer it could
    not parse. `of_objects`: the names of the pieces that it may have shown of this one.
    """

    parsed: str | None
    parsed_of_any_turns: str | None
    exact: str
    exact_of_any_turns: str
    has_turns: bool
    raw: str
    object: str
    object_of_any_turns: str
    of_objects: tuple[str, ...]
    inputs: frozenset[str]

    @property
    def all(self) -> list[str]:
        parsed = [name for name in (self.parsed, self.parsed_of_any_turns) if name is not None]
        return [*parsed, self.exact, self.exact_of_any_turns, self.raw, *self.of_objects]


def may_have(messages: Sequence[Any]) -> bool:
    """Whether an exchange with these messages may have names: quick, for every request."""
    first = messages[0] if messages else None
    if not isinstance(first, Mapping) or first.get("role") != "system":
        return False
    content = first.get("content")
    if isinstance(content, list):
        content = content[0].get("text") if content and isinstance(content[0], Mapping) else None
    return isinstance(content, str) and signature.may_be_signature(content)


def names(messages: Messages, answer: str) -> Names | None:
    """The names of an exchange; None if no adapter of DSPy's can have written its question."""
    texts = [text for message in messages if (text := _text(message)) is not None]
    if len(texts) < max(2, len(messages)) or sum(map(len, texts)) + len(answer) > MAX_CHARACTERS:
        return None
    if messages[0].get("role") != "system" or messages[-1].get("role") != "user":
        return None
    task = signature.read(texts[0])
    if task is None:
        return None
    try:
        return _names(task, messages[1:-1], texts[1:], answer)
    except RecursionError:
        return None


def _names(task: Signature, earlier: Messages, texts: list[str], answer: str) -> Names:
    question, outputs, shown = _question(task, texts[-1]), _outputs(task, answer), _shown(answer)
    turns = [
        [message.get("role"), _turn(task, message, text)]
        for message, text in zip(earlier, texts[:-1], strict=True)
    ]

    def key(what: str, *parts: Any) -> str:
        return _key(what, task.task, *parts)

    def of_piece(piece: str) -> tuple[str, str, str]:
        any_turns = key("object of any turns", question, piece)
        return key("object", turns, question, piece), any_turns, key("raw", piece)

    return Names(
        None if outputs is None else key("parsed", turns, question, outputs),
        None if outputs is None else key("parsed of any turns", question, outputs),
        key("exact", turns, question, shown),
        key("exact of any turns", question, shown),
        bool(turns),
        key("raw", shown),
        key("object", turns, question, shown),
        key("object of any turns", question, shown),
        tuple(name for piece in _pieces(task, answer, shown) for name in of_piece(piece)),
        frozenset(_key("input", *pair) for pair in _pairs(question)),
    )


def _shown(answer: str) -> str:
    """An answer without the thoughts that it begins with: LiteLLM removes them before a program reads it."""
    return _THOUGHTS.sub("", answer).strip()


def _pieces(task: Signature, answer: str, shown: str) -> list[str]:
    """The pieces that the JSON adapter may show in place of an answer, read with its thoughts or without."""
    if task.adapter != "json":
        return []
    found = (_braced(text) for text in dict.fromkeys((shown, answer)))
    return [piece for piece in dict.fromkeys(found) if piece is not None and piece != shown]


def _braced(text: str) -> str | None:
    """The first piece of a text in braces that match, strings or not: as JSONAdapter.parse takes it."""
    opened: list[int] = []
    closed: dict[int, int] = {}
    for brace in _BRACES.finditer(text):
        if brace[0] == "{":
            opened.append(brace.start())
        elif opened:
            closed[opened.pop()] = brace.end()
            if not opened:
                break
    return text[min(closed) : closed[min(closed)]] if closed else None


def _key(*parts: Any) -> str:
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=_KEY_BYTES).hexdigest()


def _text(message: Mapping[str, Any]) -> str | None:
    """A message's text; None if it has more than text."""
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        return None if None in parts else "".join(map(str, parts))
    return content if isinstance(content, str) else None


# ------------------------------------------------------------------ questions


def _question(task: Signature, text: str) -> list[str]:
    """A question without one adapter's own marks: names of inputs and the texts after them, in turn.

    The adapters write inputs alike except for the marks between them. So all marks of inputs are removed, an
    adapter's or an input's: both sides come to the same text, and the origin of a mark does not matter.
    """
    reminder = text.rfind(signature.REMINDERS[task.adapter])
    if reminder == 0 or (reminder > 0 and text[:reminder].endswith("\n\n")):
        text = text[:reminder]
    if not task.inputs:
        return [field_values.plain(text)]
    any_of = "|".join(map(re.escape, task.inputs))
    marks = re.compile(rf"\[\[ ## ({any_of}) ## \]\]|<({any_of})>|</(?:{any_of})>")
    # The text before the first name; then each name, and the text after it.
    parts = [""]
    place = 0
    pieces: list[str] = []
    for mark in marks.finditer(text):
        pieces.append(text[place : mark.start()].strip())
        place = mark.end()
        if name := mark[1] or mark[2]:
            parts[-1] = "".join(pieces)
            parts += [name, ""]
            pieces = []
    parts[-1] = "".join([*pieces, text[place:].strip()])
    return parts


def _pairs(question: list[str]) -> Iterator[tuple[str, str]]:
    """The inputs of a question, each with its name."""
    yield from zip(question[1::2], question[2::2], strict=True)


def _turn(task: Signature, message: Mapping[str, Any], text: str) -> Any:
    """A turn before the question, of a conversation or of a demonstration."""
    if message.get("role") != "assistant":
        return _question(task, text)
    outputs = _outputs(task, text)
    return field_values.plain(text) if outputs is None else outputs


# ------------------------------------------------------------------ answers


def _outputs(task: Signature, answer: str) -> list[Any] | None:
    """The values of an answer in the order of the task's outputs; None if it does not have them."""
    read = {"chat": _of_chat, "json": _of_json, "xml": _of_xml}[task.adapter]
    try:
        values = read(task, answer)
    except ValueError:
        return None
    if not values:
        return None
    # A missing optional output counts as None: a field that may be None.
    return [values.get(name, "None") for name in task.outputs] if _has_needed(task, values) else None


def _has_needed(task: Signature, values: Mapping[str, Any]) -> bool:
    return all(name in values or "None" in kind for name, kind in task.outputs.items())


def _of_chat(task: Signature, answer: str) -> dict[str, Any]:
    """The values as ChatAdapter.parse reads them: a line that begins with any field's mark ends the field
    before; firsts count."""
    sections: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in answer.splitlines():
        mark = _HEADER.match(line.strip())
        if mark is None:
            lines.append(line)
            continue
        rest = line[mark.end() :].strip()
        lines = [rest] if rest else []
        sections.setdefault(mark[1], lines)
    return {
        name: field_values.form(task.outputs[name], "\n".join(lines), task.schemas.get(name))
        for name, lines in sections.items()
        if name in task.outputs
    }


def _of_json(task: Signature, answer: str) -> dict[str, Any]:
    found = _object(answer)
    return {
        name: _of_json_value(task.outputs[name], value, task.schemas.get(name))
        for name, value in found.items()
        if name in task.outputs
    }


def _of_json_value(kind: str, value: Any, schema: Any) -> Any:
    if isinstance(value, str):
        return field_values.form(kind, value, schema)
    if kind in ("str", "bool", "int", "float") or kind.startswith("Literal["):
        return field_values.form(kind, str(value))
    return field_values.of_value(value, schema)


def _object(answer: str) -> dict[str, Any]:
    """The JSON object in an answer. Raises ValueError."""
    decoder = json.JSONDecoder()
    place = answer.find("{")
    left = _MAX_READ
    for _ in range(_MAX_TRIES):
        left -= len(answer) - place
        if place < 0 or left < 0:
            break
        try:
            found, _ = decoder.raw_decode(answer, place)
            return found
        except ValueError:
            place = answer.find("{", place + 1)
    raise ValueError("no object")


def _of_xml(task: Signature, answer: str) -> dict[str, Any]:
    """Values as the XML adapter writes them, or as a model writes them after its example."""
    try:
        return dict(_written(task, answer.strip()))
    except ValueError:
        return dict(_imitated(task, answer))


def _written(task: Signature, answer: str) -> Iterator[tuple[str, Any]]:
    """The values as XMLAdapter.format_assistant_message_content writes them: every output, in its order."""
    order = [*task.outputs]
    for name, after in zip(order, [*order[1:], None], strict=True):
        is_flat = answer.startswith(f"<{name}>\n")
        if not is_flat and not answer.startswith((f"<{name}>", f"<{name} />")):
            raise ValueError(f"no {name}")
        end = len(answer) if after is None else _end(answer, name, after)
        element, answer = answer[:end], answer[end:].lstrip()
        if not is_flat:
            yield name, field_values.of_element(element)
            continue
        if not element.endswith(f"\n</{name}>"):
            raise ValueError(f"{name} does not end")
        # Between `<name>` and `</name>`, which an empty text has only one line between.
        text = element[len(name) + 2 : -len(name) - 3]
        kind = task.outputs[name]
        yield name, field_values.form(kind, _unescaped(text) if kind == "str" else text)


def _end(answer: str, name: str, after: str) -> int:
    """Where an element ends that another follows. Raises ValueError."""
    ends = [answer.find(f"{close}\n\n<{after}") for close in (f"</{name}>", f"<{name} />")]
    found = [
        place + len(close)
        for place, close in zip(ends, (f"</{name}>", f"<{name} />"), strict=True)
        if place >= 0
    ]
    if not found:
        raise ValueError(f"no {after}")
    return min(found)


def _imitated(task: Signature, answer: str) -> Iterator[tuple[str, Any]]:
    """The values as a model writes them, with more around and between."""
    for name, kind in task.outputs.items():
        opened, closed, empty = f"<{name}>", f"</{name}>", f"<{name} />"
        begin = answer.find(opened)
        end = answer.find(closed, begin)
        if begin < 0 or end < 0:
            if empty in answer:
                yield name, field_values.of_element(empty)
            continue
        text = answer[begin + len(opened) : end]
        if text.lstrip().startswith("<") and not field_values.is_text(kind):
            yield name, field_values.of_element(f"{opened}{text}{closed}", stripped=True)
        else:
            yield name, field_values.form(kind, _unescaped(text))


def _unescaped(text: str) -> str:
    return text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
