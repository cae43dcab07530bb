"""Reads the fields of a task from a system message of any of DSPy's adapters.

The chat, the XML, the JSON and the BAML adapter begin it alike, with the fields and their types, and end it
alike, with the instructions; between them each shows its own form (dspy 3.4.1, adapters/*.py:
format_system_message).
Neighbours: parsed_fields.py cuts messages and answers up by the names found here. Pure.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

Adapter = Literal["chat", "xml", "json"]

_INPUTS = "Your input fields are:\n"
_OUTPUTS = "\nYour output fields are:\n"
_STRUCTURE = (
    "\nAll interactions will be structured in the following way, with the appropriate values filled in."
)
_OBJECTIVE = "\nIn adhering to this structure, your objective is:"
_FIELD = re.compile(r"(\d+)\. `(\w+)` \(")
# No task has more fields.
_MAX_FIELDS = 100
_JSON_PART = "Outputs will be a JSON object with the following fields.\n\n"
# Of the BAML adapter, which asks for JSON by a form like the chat adapter's.
_BAML_PART = "]]\nOutput field `"
_CHAT_PART = "[[ ## completed ## ]]"
_SCHEMA = "# note: the value you produce must adhere to the JSON schema: "
# How each adapter begins the reminder at the end of a question.
REMINDERS: dict[Adapter, str] = {
    "chat": "Respond with the corresponding output fields, starting with the field `[[ ## ",
    "xml": "Respond with the corresponding output fields wrapped in XML tags `<",
    "json": "Respond with a JSON object in the following order of fields: `",
}


@dataclass(frozen=True)
class Signature:
    """The fields of a task. `task`: the whole system message except one adapter's own format; the task is
    identified by it."""

    task: tuple[str, str]
    inputs: dict[str, str]
    # Name → the type as it is written there.
    outputs: dict[str, str]
    adapter: Adapter
    structure: str

    @cached_property
    def schemas(self) -> dict[str, Any]:
        """Output → its JSON schema, where the form shows one."""
        shown = _shown(self)
        schemas = {name: _decoded(str(shown.get(name)).partition(_SCHEMA)[2]) for name in self.outputs}
        return {name: schema for name, schema in schemas.items() if isinstance(schema, dict)}


def may_be_signature(system: str) -> bool:
    """Whether a system message may be an adapter's: quick, for every request."""
    return system.startswith(_INPUTS)


@lru_cache(maxsize=64)
def read(system: str) -> Signature | None:
    """The signature in a system message; None if no adapter wrote it."""
    if not system.startswith(_INPUTS):
        return None
    inputs, _, rest = system.partition(_OUTPUTS)
    outputs, _, structure = rest.partition(_STRUCTURE)
    structure, found, objective = structure.partition(_OBJECTIVE)
    if not found:
        return None
    input_names, output_names = _fields(inputs.removeprefix(_INPUTS)), _fields(outputs)
    if not output_names or max(len(input_names), len(output_names)) > _MAX_FIELDS:
        return None
    description = system[: system.index(_STRUCTURE)]
    return Signature((description, objective), input_names, output_names, _adapter(structure), structure)


def _fields(section: str) -> dict[str, str]:
    """Names and types: lines that count on from 1. A description may have any other lines."""
    found: dict[str, str] = {}
    for line in section.split("\n"):
        begun = _FIELD.match(line)
        if begun and int(begun[1]) == len(found) + 1:
            found[begun[2]] = line[begun.end() :].partition("):")[0]
    return found


def _adapter(structure: str) -> Adapter:
    if _JSON_PART in structure or _BAML_PART in structure:
        return "json"
    return "chat" if _CHAT_PART in structure else "xml"


def _shown(signature: Signature) -> dict[str, Any]:
    """The form's example value of each output."""
    if signature.adapter == "json":
        shown = _decoded(signature.structure.partition(_JSON_PART)[2])
        return shown if isinstance(shown, dict) else {}
    parts = [signature.structure.partition(f"[[ ## {name} ## ]]\n") for name in signature.outputs]
    return {
        name: after.partition("\n")[0] for name, (_, _, after) in zip(signature.outputs, parts, strict=True)
    }


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
