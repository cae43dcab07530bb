"""The value of an output field in one form, however an adapter of DSPy's wrote it.

Between a model's answer and the text that a training client sends lies a parse by the field's type: `true`
comes back as `True`, `["a"]` as `<item>a</item>`, a model of pydantic's with its defaults. Two texts with the
same value have the same form here; two with different values have different ones.
Neighbours: parsed_fields.py cuts the fields out and has the types from the system message. Pure.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from runtime.gateway.samples.xml_elements import Node, parse

# Python's own reader of literals is given no more: its time and its stack are not bounded by much else.
_LITERAL_CHARACTERS = 10_000
_MAX_DEPTH = 100
_TRUE = frozenset(("true", "1", "yes", "on", "t", "y", "1.0"))
_FALSE = frozenset(("false", "0", "no", "off", "f", "n", "0.0"))
_FENCE = re.compile(r"```\w*\n(.*)\n```", re.DOTALL)

Schema = Mapping[str, Any]


def form(kind: str, text: str, schema: Schema | None = None) -> Any:
    """The value that a text is, of a field of this type. `schema`: its JSON schema, where one was shown."""
    text = plain(text)
    if is_text(kind):
        return text
    if kind == "bool":
        return _boolean(text)
    if kind in ("int", "float"):
        return _number(kind, text)
    if kind.startswith("Literal["):
        return _unwrapped(text)
    value = _read(text)
    if value is None and text not in ("null", "None"):
        return text
    return of_value(value, schema)


def of_value(value: Any, schema: Schema | None = None) -> Any:
    """The form of a value that was written as JSON; `schema` describes pydantic's conversion of it."""
    definitions = (schema or {}).get("$defs", {})
    return _tree(_coerced(value, schema or {}, definitions, 0), 0, nested=False)


def of_element(text: str, stripped: bool = False) -> Any:
    """The form of a value by its whole element, where the XML adapter nests it. Raises ValueError.

    `stripped`: white space in it does not count, as where a model wrote it.
    """
    nodes = parse(text)
    if len(nodes) != 1:
        raise ValueError("not one element")
    return _of_node(nodes[0], stripped, 0)


def is_text(kind: str) -> bool:
    """Whether DSPy keeps a value of this type as text: `str`, `str | None` and the like."""
    words = set(re.findall(r"[^\[\], ]+", kind))
    return kind == "str" or (kind.startswith(("Union[", "Optional[")) and {"str", "NoneType"} <= words)


def plain(text: str) -> str:
    """A text as the adapters' own readers leave it: lines as lines, nothing around them."""
    return "\n".join(text.splitlines()).strip()


def _boolean(text: str) -> str:
    word = text.strip("\"'").lower()
    return "True" if word in _TRUE else "False" if word in _FALSE else text


def _number(kind: str, text: str) -> str:
    try:
        number = float(text.strip("\"'"))
        if kind == "float":
            return str(number)
        return text if number != int(number) else str(_integer(text.strip("\"'")))
    except (ValueError, OverflowError):
        return text


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        return int(float(text))


def _unwrapped(text: str) -> str:
    """One of a few values, as some models write it: in the type's own words, or in quotes."""
    if text.startswith(("Literal[", "str[")) and text.endswith("]"):
        text = text[text.find("[") + 1 : -1]
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        text = text[1:-1]
    return text


def _read(text: str) -> Any:
    """A text as JSON, or as Python writes the same; None if it is neither."""
    if fenced := _FENCE.fullmatch(text):
        text = fenced[1]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    if len(text) > _LITERAL_CHARACTERS:
        return None
    try:
        value = ast.literal_eval(text)
        json.dumps(value)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None
    return value


def _coerced(value: Any, schema: Schema, definitions: Mapping[str, Any], depth: int) -> Any:
    """The value after pydantic's conversion: numbers from texts, and defaults for missing fields."""
    if depth > _MAX_DEPTH:
        raise ValueError("nested too deeply")
    schema = _matching_schema(value, _resolved(schema, definitions), definitions)
    kind = schema.get("type")
    if kind == "array" and isinstance(value, list):
        return [_coerced(it, schema.get("items") or {}, definitions, depth + 1) for it in value]
    if isinstance(value, dict) and kind in ("object", None):
        fields, rest = schema.get("properties", {}), schema.get("additionalProperties")
        rest = rest if isinstance(rest, Mapping) else {}
        # A pydantic model ignores fields that it does not have.
        known = value if not fields else {name: it for name, it in value.items() if name in fields}
        missing = {
            name: it["default"] for name, it in fields.items() if "default" in it and name not in value
        }
        return {
            name: _coerced(it, fields.get(name, rest), definitions, depth + 1)
            for name, it in {**known, **missing}.items()
        }
    return _scalar(kind, value)


def _resolved(schema: Schema, definitions: Mapping[str, Any]) -> Schema:
    reference = schema.get("$ref")
    found = definitions.get(reference.rsplit("/", 1)[-1]) if isinstance(reference, str) else None
    return found if isinstance(found, Mapping) else schema


def _matching_schema(value: Any, schema: Schema, definitions: Mapping[str, Any]) -> Schema:
    """The schema among several that a value fits; the first that is not null if none does."""
    choices = schema.get("anyOf")
    if not isinstance(choices, list):
        return schema
    resolved = [_resolved(choice, definitions) for choice in choices]
    fitting = [choice for choice in resolved if choice.get("type") == _type(value)]
    others = [choice for choice in resolved if choice.get("type") != "null"]
    return next(iter(fitting or others), schema)


def _type(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    types = ((str, "string"), (int, "integer"), (float, "number"), (list, "array"), (dict, "object"))
    return next((name for of, name in types if isinstance(value, of)), "null")


def _scalar(kind: Any, value: Any) -> Any:
    if isinstance(value, str) and kind in ("integer", "number"):
        return _number("int" if kind == "integer" else "float", value)
    if kind == "number" and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind == "integer" and isinstance(value, float) and value == int(value):
        return int(value)
    if kind == "boolean" and not isinstance(value, bool):
        return _boolean(str(value))
    return value


def _tree(value: Any, depth: int, nested: bool = True) -> Any:
    """A value as the elements it would be written as: values with the same elements have the same form."""
    if depth > _MAX_DEPTH:
        raise ValueError("nested too deeply")
    if isinstance(value, list):
        return _children([["item", _tree(it, depth + 1)] for it in value], "<x />")
    if isinstance(value, dict):
        return _children([[str(name), _tree(it, depth + 1)] for name, it in value.items()], "")
    if value is None:
        return "<x />" if nested else "None"
    return str(value)


def _of_node(node: Node, stripped: bool, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise ValueError("nested too deeply")
    if node.is_empty:
        return "<x />"
    if not node.children:
        return node.text.strip() if stripped else node.text
    return _children([[child.name, _of_node(child, stripped, depth + 1)] for child in node.children], "")


def _children(pairs: Sequence[list[Any]], empty: str) -> Any:
    """Elements in their order where they are a list's, by their names where they are an object's."""
    if not pairs:
        return empty
    if all(name == "item" for name, _ in pairs):
        return list(pairs)
    return sorted(pairs, key=lambda pair: pair[0])
