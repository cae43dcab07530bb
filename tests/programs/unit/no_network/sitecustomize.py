"""For a Python with this folder on PYTHONPATH: whatever touches the network is refused, and printed."""

import sys

_REFUSED = ("socket.connect", "socket.bind", "socket.getaddrinfo", "socket.sendto")


def _refuse(event: str, arguments: tuple[object, ...]) -> None:
    if event in _REFUSED:
        print(event, arguments, file=sys.stderr, flush=True)
        raise OSError(f"{event} is refused")


sys.addaudithook(_refuse)
