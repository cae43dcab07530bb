"""OpenAI's `echo`: a completion's answer begins with its prompt, logprobs included.

The engine gives the prompt's logprobs. It gives no text of the prompt beside token ids, which we always ask
for, so the text is put before the answer here. Neighbours: proxy.py asks for the texts when the engine
answers, answers.py puts them in. A sample has only what was sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runtime.gateway.engines.engine_client import EngineClient

Body = dict[str, Any]


def is_echoed(body: Body) -> bool:
    """Whether a completion's answer begins with its prompt."""
    return body.get("echo") is True


def samples_nothing(body: Body) -> bool:
    """Whether only the prompt is to be scored: the engine samples one token all the same."""
    return is_echoed(body) and body.get("max_tokens") == 0


async def prompt_texts(body: Body, client: EngineClient) -> Sequence[str]:
    """The text of each prompt of a completion; () if it has no echo. Raises EngineError."""
    if not is_echoed(body):
        return ()
    prompt = body["prompt"]
    is_one = isinstance(prompt, str) or (prompt and isinstance(prompt[0], int | float))
    # One after the other: there may be any number, each no longer than the context.
    return [await _text_of(one, client) for one in ([prompt] if is_one else prompt)]


async def _text_of(prompt: Any, client: EngineClient) -> str:
    """Of token ids the engine says it; to vLLM 5.0 is an id as well."""
    if isinstance(prompt, str):
        return prompt
    return (await client.tokenizer("/detokenize", {"tokens": [int(token) for token in prompt]}))["prompt"]


def put_before(choice: Body, texts: Sequence[str], choices_of_one: int) -> None:
    """Put its prompt before a choice's text, in place. A prompt has `choices_of_one` choices in a row."""
    if texts:
        choice["text"] = texts[choice["index"] // choices_of_one] + choice["text"]
