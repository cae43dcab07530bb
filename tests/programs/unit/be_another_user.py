"""What another user of this computer sees of a relay: `be_another_user.py UID ask PORT TIMES`, or `peers`.

ask: opens so many connections, sends each what is on stdin, and says for each what came until it was closed,
    or nothing where it was not within half a minute.
peers: says of a connection whose client is root, and of one of its own, whether it is this user's.

Begun as root, it becomes that user when all is imported: their rights may not reach as far as this file.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys

from launcher.proxy import relay_peers

SECONDS = 30.0


def become(user: int) -> None:
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)


def client_of(port: int) -> socket.socket:
    """Without a name to look up, which would import something."""
    client = socket.socket()
    client.settimeout(SECONDS)
    client.connect(("127.0.0.1", port))
    return client


def ask(port: int, times: int, sent: bytes) -> list[str]:
    clients = [client_of(port) for _ in range(times)]
    got = [b""] * times
    for client in clients:
        with contextlib.suppress(OSError):
            client.sendall(sent)
    for number, client in enumerate(clients):
        with contextlib.suppress(OSError):
            while piece := client.recv(65536):
                got[number] += piece
    return [text.decode("latin-1") for text in got]


def connected(listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    return client_of(listener.getsockname()[1]), listener.accept()[0]


def main(user: str, what: str, *words: str) -> None:
    if what == "ask":
        sent = sys.stdin.buffer.read()
        become(int(user))
        print(json.dumps(ask(int(words[0]), int(words[1]), sent)))
        return
    listener = socket.create_server(("127.0.0.1", 0))
    roots = connected(listener)
    become(int(user))
    both = {"root": roots, "own": connected(listener)}
    said = {
        name: relay_peers.is_this_users(client.getpeername(), client.getsockname())
        for name, (client, _) in both.items()
    }
    print(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
