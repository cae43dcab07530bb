"""DSPy's ChatAdapter, for signatures of one string field to another: messages out, answer in.

Neighbours: `examples/tiny_model/make.py` renders its corpus with it. It exists because DSPy is not in the
runtime's environment; a test holds it equal to `dspy.ChatAdapter` (3.4.1). Knows nothing of models or tokens.
"""

from __future__ import annotations

import re

Message = dict[str, str]

_HEADER = re.compile(r"\[\[ ## (\w+) ## \]\]")


def messages(source: str, target: str, text: str) -> list[Message]:
    """The system and user messages of the signature `source -> target` for one input."""
    return [
        {"role": "system", "content": _system(source, target)},
        {"role": "user", "content": _user(source, target, text)},
    ]


def completion(target: str, text: str) -> str:
    """The assistant's answer as DSPy writes it for fine-tuning, ending in the marker it asks for."""
    return f"[[ ## {target} ## ]]\n{text}\n\n[[ ## completed ## ]]\n"


def parse(target: str, answer: str) -> str | None:
    """The field's text as DSPy reads it (up to the next header or the end), or None if DSPy fails."""
    field: str | None = None
    lines: list[str] | None = None
    for line in answer.splitlines():
        header = _HEADER.match(line.strip())
        if header:
            if lines is not None and field is None:
                field = "\n".join(lines).strip()
            rest = line[header.end() :].strip()
            lines = [rest] if header.group(1) == target and field is None else None
        elif lines is not None:
            lines.append(line)
    return "\n".join(lines).strip() if lines is not None and field is None else field


def _system(source: str, target: str) -> str:
    return (
        f"Your input fields are:\n1. `{source}` (str):\n"
        f"Your output fields are:\n1. `{target}` (str):\n"
        "All interactions will be structured in the following way, with the appropriate values filled in.\n\n"
        f"[[ ## {source} ## ]]\n{{{source}}}\n\n[[ ## {target} ## ]]\n{{{target}}}\n\n[[ ## completed ## ]]\n"
        "In adhering to this structure, your objective is: \n"
        f"        Given the fields `{source}`, produce the fields `{target}`."
    )


def _user(source: str, target: str, text: str) -> str:
    return (
        f"[[ ## {source} ## ]]\n{text}\n\n"
        f"Respond with the corresponding output fields, starting with the field `[[ ## {target} ## ]]`, "
        "and then ending with the marker for `[[ ## completed ## ]]`."
    )
