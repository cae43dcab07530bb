"""Tells vLLM's parsers where the last turn of a prompt in ids begins: the thoughts before it are over.

vLLM looks for the end of a thought in the whole prompt to say, of an answer that is streamed or held to a
grammar, whether it begins inside one. A prompt in ids has the earlier answers as they were sampled, thoughts
included, which the chat template would not have shown: they say nothing of the answer to come.
Neighbours: server.py puts it in place; the gateway's prefix_continuation.py sends the field, which its table
of fields refuses of anybody else. Imports vLLM only where it is put in place: the gateway has the field's
name of here.
"""

from __future__ import annotations

from typing import Any

# A field of a chat request: how many ids of its prompt stand before the last turn.
LAST_TURN = "slipway_last_turn"


def install() -> None:
    """Let parsers of such requests see their last turn alone. Once per process."""
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat

    make = OpenAIServingChat._make_parser

    def make_for_the_last_turn(self: Any, request: Any, *arguments: Any, **settings: Any) -> Any:
        parser = make(self, request, *arguments, **settings)
        begins = (request.model_extra or {}).get(LAST_TURN)
        return parser if begins is None else see_from(parser, begins)

    OpenAIServingChat._make_parser = make_for_the_last_turn


def see_from(parser: Any, begins: int) -> Any:
    """The parser, with the ids before `begins` left out where it asks for the end of a thought."""
    of_all = parser.is_reasoning_end
    parser.is_reasoning_end = lambda input_ids: of_all(input_ids[begins:])
    return parser
