"""The limit of open files of a process: raised as far as the system allows, and never an error.

Neighbours: `backends/ssh/link.py` asks for it before its first ssh, which inherits the limit, the launcher's
`relay.py` and the gateway for their own connections. A Mac gives 256 by default.
"""

from __future__ import annotations

import contextlib
import resource

# A request in progress holds two in the relay, one in ssh and two in the gateway.
WANTED = 16384
# The most a Mac allows, whatever hard limit it reports.
_MACOS_MAX = 10240


def raise_limit(wanted: int = WANTED) -> int:
    """Raise the soft limit towards `wanted`. Returns the limit then. With a low one fewer requests go at
    once."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for aim in (wanted, min(wanted, _MACOS_MAX)):
        if hard != resource.RLIM_INFINITY:
            aim = min(aim, hard)
        if soft == resource.RLIM_INFINITY or soft >= aim:
            break
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (aim, hard))
            break
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
