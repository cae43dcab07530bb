"""A relay until its stdin ends: `open_relay.py SOCKET TOKEN UNPROVEN_SECONDS SILENT_SECONDS [keyless]`.

SILENT_SECONDS: how long it waits for a body's next piece. `keyless`: as under `--arbor`. It says its port
first.
"""

from __future__ import annotations

import sys
from pathlib import Path

from launcher.proxy import relay_body, relay_connection
from launcher.proxy.relay import Relay


def main(socket: str, token: str, unproven_seconds: str, silent_seconds: str, keyless: str = "") -> None:
    relay_connection.UNAUTHENTICATED_SECONDS = float(unproven_seconds)
    relay_body._IDLE_SECONDS = float(silent_seconds)
    relay = Relay(Path(socket), 0, token=token, keyless_option="--arbor" if keyless else None)
    print(relay.start(), flush=True)
    sys.stdin.read()
    relay.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
