"""Reads a file of conversations, as OpenAI's fine-tuning has it: one JSON object a line, with `messages`.

Neighbours: `routes.py` checks at the upload whether an engine could take it, `job_runner.py` reads it; each
in a thread, because a file may be large. An error names its line. Knows nothing of tokens: a conversation is
rendered when its step is built.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from runtime.gateway.requests.text_length import characters, max_characters
from runtime.shared.schema import SupervisedExample

MAX_LINES = 100_000
# Of one conversation: each is a sequence of its own unless it goes on from the one before.
MAX_ANSWERS = 256
# Fields of OpenAI's form that have no effect on the learning.
_PASSED_OVER = ("parallel_tool_calls", "functions", "metadata")
_ROLES = ("system", "developer", "user", "assistant", "tool")


class ConversationError(Exception):
    """The file cannot be trained on; the text names the line and the reason."""


def read(path: Path) -> list[SupervisedExample]:
    """Every conversation of a file. Raises ConversationError for the first line that is none, and OSError."""
    found: list[SupervisedExample] = []
    # By "\n" alone: a text may hold other characters that end a line for some.
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        if len(found) >= MAX_LINES:
            raise ConversationError(f"more than {MAX_LINES} lines")
        try:
            found.append(_conversation(line))
        except ConversationError as error:
            raise ConversationError(f"line {number}: {error}") from None
    if not found:
        raise ConversationError("it is empty")
    return found


def check_lengths(content: bytes, context_tokens: int) -> None:
    """Raises ConversationError for the first line that is longer than any context of so many tokens."""
    most = max_characters(context_tokens)
    number, start = 0, 0
    while start < len(content):
        number, end = number + 1, content.find(b"\n", start)
        end = len(content) if end < 0 else end
        if end - start > most and (count := _length(content[start:end])) > most:
            holds = f"the context of {context_tokens} tokens holds at most {most}"
            raise ConversationError(f"line {number}: {count} characters, and {holds}: split it")
        start = end + 1


def _length(line: bytes) -> int:
    """The characters of a line that an engine would be given."""
    try:
        parsed = json.loads(line)
    except (ValueError, RecursionError):
        return len(line)
    if isinstance(parsed, dict):
        parsed = {name: value for name, value in parsed.items() if name not in _PASSED_OVER}
    return characters(parsed)


def _conversation(line: bytes) -> SupervisedExample:
    try:
        parsed = json.loads(line)
    except (ValueError, RecursionError):
        raise ConversationError("not JSON") from None
    if not isinstance(parsed, dict):
        raise ConversationError("not a JSON object")
    if "messages" not in parsed:
        hint = " (prompt and completion: write them as messages)" if "prompt" in parsed else ""
        raise ConversationError(f"no messages{hint}")
    if isinstance(parsed.get("functions"), list) and parsed["functions"]:
        raise ConversationError("functions: write them as tools")
    kept = {name: value for name, value in parsed.items() if name not in _PASSED_OVER}
    try:
        example = SupervisedExample.model_validate(kept)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConversationError(f"{where}: {first['msg'].lower()}") from None
    _check(example.messages)
    return example


def _check(messages: list[dict[str, Any]]) -> None:
    answers = 0
    for message in messages:
        if message.get("role") not in _ROLES:
            raise ConversationError(f"a message's role is one of {', '.join(_ROLES)}")
        weight = message.get("weight", 1)
        if weight not in (0, 1) or isinstance(weight, bool):
            raise ConversationError("a message's weight is 0 or 1")
        answers += message["role"] == "assistant" and weight == 1
    if not answers:
        raise ConversationError("there is no assistant message to train on")
    if answers > MAX_ANSWERS:
        raise ConversationError(f"more than {MAX_ANSWERS} messages of the assistant: split it")
