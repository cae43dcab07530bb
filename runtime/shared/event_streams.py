"""How a stream of server-sent events ends: some programs leave at its last event, before the connection does.

Neighbours: the gateway writes an end, the relay looks for one: what is delivered up to it is a whole answer.
"""

from __future__ import annotations

# OpenAI's, and a comment, which every reader skips, behind the last event of a dialect that has no such end.
OPENAI_END = b"data: [DONE]\n\n"
COMMENT_END = b": end\n\n"
_LONGEST = max(len(OPENAI_END), len(COMMENT_END))


def tail(before: bytes, piece: bytes) -> bytes:
    """As much of a stream's end, after one piece more, as `is_stream_end` needs."""
    return (before + piece)[-_LONGEST:]


def is_stream_end(tail_of_stream: bytes) -> bool:
    """Whether nothing of the answer is to come."""
    return tail_of_stream.endswith((OPENAI_END, COMMENT_END))
