"""Checks a port of this computer: tells whether the endpoint can listen on it, and which process already
does.

Neighbours: `request_validation.py` asks before a run, `doctor.py` at any time. Binds a port only to release
it.
"""

from __future__ import annotations

import errno
import socket

from launcher.base.errors import PreflightError
from launcher.base.home import Home
from launcher.records.endpoint import other_port_hint


def check_port(port: int, home: Home | None = None, *, keyless_option: str | None = None) -> None:
    """Raises PreflightError if the port of 127.0.0.1 is taken. `keyless_option`: no other port will do."""
    if (trouble := why_port_unusable(port)) is None:
        return
    hint = (
        other_port_hint(port, keyless_option)
        if keyless_option
        else "leave out --port: launch takes 7453, or the next free port"
    )
    raise PreflightError(f"port {port} is taken", port_owner(port, home) or trouble, hint)


def why_port_unusable(port: int) -> str | None:
    """The reason the port cannot be listened on; None if it can."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return "another program uses it" if error.errno == errno.EADDRINUSE else error.strerror
    return None


def port_owner(port: int, home: Home | None = None) -> str | None:
    """The process that listens on a port, as far as this user may know: one of our runs, else another
    process of the user's."""
    from launcher.base import process_inspection
    from launcher.records.records import RecordStore

    for record in RecordStore(home).list() if home else ():
        ours = record.live and record.url is not None and record.url.endswith(f":{port}")
        if ours and not record.elsewhere and record.is_attended:
            return f"the run {record.name or record.id} uses it"
    found = process_inspection.listener(port)
    return None if found is None else f"{process_inspection.name_of(found)} (pid {found.pid}) uses it"
