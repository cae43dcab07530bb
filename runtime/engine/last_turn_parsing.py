"""Tells vLLM's parsers where the last turn of a prompt in ids begins: earlier thoughts are over.

For an answer that is streamed or held to a grammar, vLLM must know whether it begins inside a thought. It
looks for the end of a thought in the whole prompt. A prompt in ids has the earlier answers as they were
sampled, with thoughts that the chat template would have left out. These tell nothing about the next answer.
Neighbours: server.py installs it; the gateway's prefix_continuation.py sends the field, which the gateway's
table of fields refuses from any client. Imports vLLM only when it is installed, because the gateway imports
the field's name from here.
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
    """The parser, with the ids before `begins` left out when it looks for the end of a thought."""
    of_all = parser.is_reasoning_end
    parser.is_reasoning_end = lambda input_ids: of_all(input_ids[begins:])
    return parser
