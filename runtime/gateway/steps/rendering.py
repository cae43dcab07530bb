"""A conversation's answer in exact ids: the prompt and the answer, by the engine's own rendering.

Neighbours: text_members.py asks for members given as text, examples.py for a supervised step's examples; the
engine has the chat template and the tokenizer. Knows nothing of rewards, steps or samples.
"""

from __future__ import annotations

from typing import Any

from runtime.gateway.engines.engine_client import EngineClient
from runtime.gateway.requests.text_length import characters, max_characters

Message = dict[str, Any]
Tools = list[dict[str, Any]] | None

# A placeholder, rendered to see how an answer ends.
_ANY_ANSWER = "a"
TOO_LONG = "longer than the context"


class NotRenderedError(Exception):
    """A text that has no exact ids as an answer in the model's chat template; the message is the reason."""


async def render(
    client: EngineClient, messages: list[Message], answer: str | Message, tools: Tools = None
) -> tuple[list[int], list[int]]:
    """The ids of a question in the engine's own rendering, and of its answer with the template's end of an
    answer.

    `answer`: a text, or an assistant's message, which may have tool calls. Raises EngineError. Raises
    NotRenderedError if the template would not show the answer right after its prompt: a text as its own ids,
    a message in another form with the end of a text. Raises it also if both are longer than the context.
    """
    message = {"role": "assistant", "content": answer} if isinstance(answer, str) else answer
    context_tokens = await client.context_length()
    if characters([messages, message, tools]) > max_characters(context_tokens):
        raise NotRenderedError(TOO_LONG)
    prompt = await client.tokenize(messages, tools=tools)
    if len(prompt) >= context_tokens:
        raise NotRenderedError(TOO_LONG)
    rest = await _after(client, prompt, [*messages, message], tools)
    text = _only_text(message)
    if text is not None:
        body, end = await _split(client, rest, text)
    else:
        any_answer = {"role": "assistant", "content": _ANY_ANSWER}
        plain = await _after(client, prompt, [*messages, any_answer], tools)
        _, end = await _split(client, plain, _ANY_ANSWER)
        if rest[-len(end) :] != end:
            raise NotRenderedError("the chat template does not end it as an answer")
        body = rest[: -len(end)]
    if not body or end[0] in body:
        raise NotRenderedError("what ends an answer stands inside it")
    return prompt, [*body, end[0]]


async def _after(client: EngineClient, prompt: list[int], messages: list[Message], tools: Tools) -> list[int]:
    """The template's ids after the prompt, for a conversation that goes on from it."""
    whole = await client.tokenize(messages, add_generation_prompt=False, tools=tools)
    if whole[: len(prompt)] != prompt:
        raise NotRenderedError("the chat template changes it")
    return whole[len(prompt) :]


async def _split(client: EngineClient, rest: list[int], text: str) -> tuple[list[int], list[int]]:
    """A text's own ids, and the template's ids after them."""
    bare = await client.tokenize(text)
    if not bare or rest[: len(bare)] != bare:
        raise NotRenderedError("the chat template changes it")
    if len(rest) == len(bare):
        raise NotRenderedError("the chat template does not end an answer")
    return bare, rest[len(bare) :]


def _only_text(message: Message) -> str | None:
    """The text that is all of a message; None if there is more to it, or no text."""
    if any(value for name, value in message.items() if name not in ("role", "content", "name")):
        return None
    content = message.get("content")
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else None for part in content]
        return None if any(not isinstance(text, str) for text in texts) else "".join(map(str, texts))
    return content if isinstance(content, str) else None
