"""Reads nested elements as DSPy's XML adapter writes them: `<tags><item>a</item></tags>`.

Not an XML parser: no declarations, no comments, one attribute. One pass over any text.
Neighbours: field_values.py makes values of the elements. Pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html import unescape

_TAG = re.compile(r"""<(/?)([^\s<>/"']+)(?: key=("[^"<]*"|'[^'<]*'))?( ?/)?>""")
# More elements are no answer to a question.
_MAX_ELEMENTS = 20_000


@dataclass
class Node:
    """An element: of an entry the key is its name. `is_empty`: written as `<tag />`."""

    name: str
    text: str = ""
    children: list[Node] = field(default_factory=list)
    is_empty: bool = False


def parse(text: str) -> list[Node]:
    """The elements of a text, one after another. Raises ValueError if it is anything else."""
    root = Node("")
    # Open elements, each with its tag.
    stack = [("", root)]
    place = 0
    for count, tag in enumerate(_TAG.finditer(text)):
        if count > _MAX_ELEMENTS:
            raise ValueError("too many elements")
        between = text[place : tag.start()]
        place = tag.end()
        closes, name, key, empty = tag.groups()
        opened, node = stack[-1]
        if closes:
            if opened != name or len(stack) == 1:
                raise ValueError(f"</{name}> closes nothing")
            stack.pop()
        if closes and not node.children:
            node.text = _plain(between)
        elif between.strip():
            raise ValueError("text beside elements")
        if closes:
            continue
        child = Node(unescape(key[1:-1]) if key and name == "entry" else name, is_empty=bool(empty))
        node.children.append(child)
        if not empty:
            stack.append((name, child))
    if len(stack) > 1 or text[place:].strip():
        raise ValueError("not elements alone")
    return root.children


def _plain(text: str) -> str:
    if "<" in text:
        raise ValueError("a bracket that begins no element")
    return unescape(text) if "&" in text else text
