"""A pretend engine that calls tools, and renders a conversation as a model's chat template does.

A message is ids of its own, so a prompt goes on from the turn before id for id as long as the client sends
back what was answered. A streamed answer comes in several parts. All that it was asked and answered is kept
in a file, one JSON object a line: what a tap on its socket would hear.
"""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.runtime.pretend_engine import PretendEngine
from tests.runtime.trainer_fixtures import EOS

Message = dict[str, Any]
# Turns of a conversation that call a tool; then it ends in words.
CALLS = 2
_OPENINGS = {"system": 10, "user": 11, "assistant": 12, "tool": 13}


class ToolingEngine(PretendEngine):
    """`heard`: where it keeps what it was asked; None until it is said."""

    heard: Path | None = None

    def __init__(self, socket: Path) -> None:
        self._numbers = itertools.count()
        super().__init__(socket)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        if asked["model"] not in ("base", *self.adapters):
            return web.json_response({"error": {"message": "no such model"}}, status=404)
        number = next(self._numbers)
        message = _answer(asked["messages"], asked.get("tools") or [], number)
        prompt, ids = rendered(asked["messages"]), _said(message)
        logprobs = [{"token": "?", "logprob": -0.5 - place / 8, "bytes": []} for place in range(len(ids))]
        choice = {
            "index": 0,
            "message": message,
            "logprobs": {"content": logprobs},
            "finish_reason": "tool_calls" if message.get("tool_calls") else "stop",
            "token_ids": ids,
        }
        self._keep(asked, prompt, ids, [one["logprob"] for one in logprobs])
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
        usage["total_tokens"] = sum(usage.values())
        body = {
            "id": f"chatcmpl-{number}",
            "object": "chat.completion",
            "created": 0,
            "model": asked["model"],
        }
        if asked.get("stream"):
            return await _stream(request, _chunks(body, choice, prompt, usage))
        return web.json_response(body | {"choices": [choice], "prompt_token_ids": prompt, "usage": usage})

    def _keep(self, asked: Message, prompt: list[int], ids: list[int], logprobs: list[float]) -> None:
        if self.heard is not None:
            with self.heard.open("a") as file:
                line = {"asked": asked, "prompt": prompt, "ids": ids, "logprobs": logprobs}
                file.write(json.dumps(line) + "\n")


async def _stream(request: web.Request, chunks: Sequence[Message]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for event in (*map(json.dumps, chunks), "[DONE]"):
        await response.write(f"data: {event}\n\n".encode())
    return response


def _chunks(body: Message, choice: Message, prompt: list[int], usage: Message) -> list[Message]:
    """An answer in parts: the role, a text in two, each call with its arguments in two, the end."""
    message = choice["message"]
    deltas: list[Message] = [{"role": "assistant", "content": ""}]
    if text := message.get("content"):
        deltas += [{"content": text[:5]}, {"content": text[5:]}]
    for index, call in enumerate(message.get("tool_calls") or ()):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        deltas.append({"tool_calls": [call | {"index": index, "function": {"name": name, "arguments": ""}}]})
        for part in (arguments[:3], arguments[3:]):
            deltas.append({"tool_calls": [{"index": index, "function": {"arguments": part}}]})
    last, logprobs = len(deltas), choice["logprobs"]["content"]
    chunks = []
    for place, delta in enumerate([*deltas, {}]):
        # A token with each part, and the rest of them at the end.
        part = slice(place, None if place == last else place + 1)
        chunk = {
            "index": 0,
            "delta": delta,
            "token_ids": choice["token_ids"][part],
            "logprobs": {"content": logprobs[part]},
            "finish_reason": choice["finish_reason"] if place == last else None,
        }
        chunks.append(body | {"object": "chat.completion.chunk", "choices": [chunk]})
    chunks[0]["prompt_token_ids"] = prompt
    return [*chunks, body | {"object": "chat.completion.chunk", "choices": [], "usage": usage}]


def rendered(messages: Sequence[Message]) -> list[int]:
    """The prompt's ids: every message, and the opening of the next answer."""
    ids: list[int] = []
    for message in messages:
        closing = [] if message["role"] == "assistant" else [EOS]
        ids += [_OPENINGS[message["role"]], *_said(message, end=message["role"] == "assistant"), *closing]
    return [*ids, _OPENINGS["assistant"]]


def _said(message: Message, end: bool = True) -> list[int]:
    """The ids of what a message says, calls included."""
    content = message.get("content") or ""
    parts = content if isinstance(content, list) else [{"text": content}]
    words = " ".join(part["text"] for part in parts).split(" ")
    for call in message.get("tool_calls") or ():
        words += [call["function"]["name"], *call["function"]["arguments"].split(" ")]
    return [20 + zlib.crc32(word.encode()) % 30_000 for word in words if word] + ([EOS] if end else [])


def _answer(messages: Sequence[Message], tools: Sequence[Message], number: int) -> Message:
    """Calls of the first tool, sometimes two at once or with words before them; then the end, in words."""
    turns = sum(message["role"] == "assistant" for message in messages)
    if turns >= CALLS or not tools:
        return {"role": "assistant", "content": f"The sum is {number}, “so to say”: ünïcode <b>&amp;</b>"}
    function = tools[0]["function"]
    names = list(function["parameters"]["properties"])
    calls = [
        {
            "id": f"call-{number}-{place}",
            "type": "function",
            "function": {
                "name": function["name"],
                "arguments": json.dumps(dict.fromkeys(names, number + place)),
            },
        }
        for place in range(1 + number % 2)
    ]
    text = "Let me add these." if number % 3 == 0 else None
    return {"role": "assistant", "content": text, "tool_calls": calls}
