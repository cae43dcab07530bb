"""Makes the client's copy of the runtime's request bodies: `python -m tests.generate`.

A program must not import `runtime`: a module of that name beside it would be imported instead. A test asks
that the copy is what this makes.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from annotated_types import BaseMetadata
from pydantic.fields import FieldInfo

from runtime.shared import schema
from tests.support.environment import REPOSITORY

COPY = REPOSITORY / "launcher" / "client" / "request_bodies.py"

_HEAD = '''"""The bodies that the client sends. `python -m tests.generate` makes this file: do not edit it.

Neighbours: it is a copy of `runtime/shared/schema.py`, with the settings of a step from
`runtime/shared/train_config.py`; `schema.py` has what the client reads. Imports pydantic only.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self, TypedDict

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

'''
_SETTINGS = schema.StepSettings
# What of the runtime's file is not sent by the client, or is made here.
_LEFT_OUT = ("RECEIPT_HEADER", "RECEIPT_FOLLOWS", "MOST_RECEIPTS", "BODY_BYTES")


def made() -> str:
    """The copy's text."""
    source = Path(inspect.getfile(schema)).read_text(encoding="utf-8")
    body = source[source.index("# Request headers") :]
    body = _without(body, inspect.getsource(schema._optional_settings))
    start, end = body.index("# For a type checker"), body.index("class StepSettings")
    body = body[:start] + body[end:]
    body = body.replace(inspect.getsource(_SETTINGS), _settings_class() + "\n\n" + _keywords_class())
    for name in _LEFT_OUT:
        body = re.sub(rf"(?m)(^#.*\n)*^{name} = .*\n", "", body)
    body = re.sub(r"\bBody\b", "RequestBody", body)
    body = re.sub(r"\bAnswer\b", "ResponseBody", body)
    return _HEAD + body


def _without(text: str, part: str) -> str:
    return text.replace(part + "\n\n", "")


def _settings_class() -> str:
    lines = [f"class StepSettings(Body):\n    {_docstring(_SETTINGS)}\n"]
    lines += [f"    {name}: {_type(it)} = {_default(it)}" for name, it in _SETTINGS.model_fields.items()]
    return "\n".join(lines) + "\n"


def _keywords_class() -> str:
    """The same as a function's keywords: nothing is None there, it is left out."""
    lines = ['class TrainSettings(TypedDict, total=False):\n    """The keywords of `run.train`."""\n']
    lines += [
        f"    {name}: {_type(it).removesuffix(' | None')}" for name, it in _SETTINGS.model_fields.items()
    ]
    return "\n".join(lines) + "\n"


def _docstring(model: type[Any]) -> str:
    found = re.search(r'""".*?"""', inspect.getsource(model), re.DOTALL)
    assert found is not None
    return found[0]


def _type(field: FieldInfo) -> str:
    return " | ".join(_word(it) for it in get_args(field.annotation))


def _word(option: Any) -> str:
    if option is type(None):
        return "None"
    if get_origin(option) is Literal:
        return f"Literal[{', '.join(map(repr, get_args(option)))}]".replace("'", '"')
    return option.__name__


def _default(field: FieldInfo) -> str:
    bounds = {
        name: getattr(it, name)
        for it in field.metadata
        for name in ("gt", "ge", "lt", "le", "allow_inf_nan")
        if hasattr(it, name) and (isinstance(it, BaseMetadata) or name == "allow_inf_nan")
    }
    words = "".join(f", {name}={value!r}" for name, value in bounds.items())
    return f"Field(default=None{words})" if words else "None"


if __name__ == "__main__":
    COPY.write_text(made(), encoding="utf-8")
