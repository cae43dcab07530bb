"""How a stream of server-sent events ends: some programs leave at its last event, before the connection does.

Neighbours: the gateway writes an end, the relay looks for one: what is delivered up to it is a whole answer.
"""

from __future__ import annotations

OPENAI_END = b"data: [DONE]\n\n"
# A comment in the last event of a dialect that has no such end. Readers skip it, and none has the event
# before the blank line behind it is there.
COMMENT_END = b"\n: end\n\n"
_LONGEST = max(len(OPENAI_END), len(COMMENT_END))


def as_last(event: bytes) -> bytes:
    """An event, marked as the last of its stream."""
    return event.removesuffix(b"\n\n") + COMMENT_END


def tail(before: bytes, piece: bytes) -> bytes:
    """As much of a stream's end, after one piece more, as `is_stream_end` needs."""
    return (before + piece)[-_LONGEST:]


def is_stream_end(tail_of_stream: bytes) -> bool:
    """Whether nothing of the answer is to come."""
    return tail_of_stream.endswith((OPENAI_END, COMMENT_END))
