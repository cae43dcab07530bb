"""A port of this computer: whether the endpoint can listen on it, and who does already.

Neighbours: `request_validation.py` asks before a run, `doctor.py` at any time. Binds a port only to let it
go.
"""

from __future__ import annotations

import errno
import socket

from launcher.base.errors import PreflightError
from launcher.base.home import Home
from launcher.records.endpoint import other_port_hint


def check_port(port: int, home: Home | None = None, *, keyless_option: str | None = None) -> None:
    """Nobody listens on this port of 127.0.0.1. `keyless_option`: no other port will do by itself."""
    if (trouble := why_port_unusable(port)) is None:
        return
    hint = (
        other_port_hint(port, keyless_option)
        if keyless_option
        else "launch  # without --port: 7453, or the next free one"
    )
    raise PreflightError(f"port {port} is taken", port_owner(port, home) or trouble, hint)


def why_port_unusable(port: int) -> str | None:
    """Why the port cannot be listened on; None when it can."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return "another program uses it" if error.errno == errno.EADDRINUSE else error.strerror
    return None


def port_owner(port: int, home: Home | None = None) -> str | None:
    """Who listens on a port, as far as this user may know: a run of ours, else a process of the user's."""
    from launcher.base import running
    from launcher.records.records import RecordStore

    for record in RecordStore(home).list() if home else ():
        ours = record.live and record.url is not None and record.url.endswith(f":{port}")
        if ours and not record.elsewhere and record.is_attended:
            return f"the run {record.name or record.id} uses it"
    found = running.listener(port)
    return None if found is None else f"{running.name_of(found)} (pid {found.pid}) uses it"
