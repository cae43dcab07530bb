"""launcher/proxy/relay_connection.py: what the kernel says of the other end, asked without the event loop."""

from __future__ import annotations

import asyncio
import resource
import socket

import pytest

from launcher.proxy.relay_connection import peer_state

pytestmark = pytest.mark.process


async def connected() -> tuple[asyncio.Transport, socket.socket]:
    """A connection of the event loop's, and its other end."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(asyncio.Protocol, *listening.getsockname())
        return transport, listening.accept()[0]


def test_c52_a_program_that_is_there_is_seen_where_no_file_more_can_be_opened() -> None:
    async def scenario() -> str:
        transport, program = await connected()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            return peer_state(transport)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            transport.abort()
            program.close()

    assert asyncio.run(scenario()) == "open"


@pytest.mark.parametrize("reads", [False, True], ids=["unread", "read"])
def test_c52_who_left_before_the_answer_came_is_seen_although_it_left_in_order(reads: bool) -> None:
    async def scenario() -> list[str]:
        transport, program = await connected()
        if reads:
            transport.write(b"an answer")
            program.recv(64)
        program.close()
        seen = [peer_state(transport)]
        if not reads:
            transport.write(b"an answer")
        seen.append(peer_state(transport))
        transport.abort()
        return [*seen, peer_state(transport)]

    assert asyncio.run(scenario()) == ["closed", "closed" if reads else "reset", "reset"]
