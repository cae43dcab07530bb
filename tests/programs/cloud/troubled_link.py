"""A link to a machine in trouble, on a rig's laptop: `python troubled_link.py frozen|killed|swapped`."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from pathlib import Path

from launcher.backends.ssh.link import Link, SshHost, run_on
from launcher.base.errors import LaunchError
from launcher.base.unix_http import get_json
from tests.cloud import bare
from tests.support.waiting import wait_until

HERE = Path.cwd()
WAIT_SECONDS = 240.0


def frozen(host: SshHost) -> None:
    """ssh stopped in its tracks: to ssh itself nothing is wrong."""
    door = HERE / "g.sock"
    link = _opened(host, door)
    before = _ssh_of(link)
    os.kill(before, signal.SIGSTOP)
    begun = time.monotonic()
    wait_until(lambda: _ssh_of(link) != before and _answers(door), what="an answer by another ssh")
    print(f"mended={time.monotonic() - begun:.1f}")
    link.close()


def killed(host: SshHost) -> None:
    """ssh killed again and again: how long until an answer comes."""
    door = HERE / "door" / "g.sock"
    link = _opened(host, door)
    times = []
    for number in range(5):
        if number == 3:  # as by somebody who sweeps out /tmp
            shutil.rmtree(door.parent)
        times.append(_seconds_to_mend(link, door))
        time.sleep(0.3)  # it works for a moment before it is killed again
    print(f"slowest={max(times):.2f}")
    link.close()


def swapped(host: SshHost) -> None:
    """Another machine at the same address, with a host key of its own."""
    _opened(host, HERE / "g.sock").close()
    _, stranger = bare.rent(HERE)
    stolen = SshHost(stranger.address, host.user, host.key, HERE / "known-both")
    line = host.known_hosts.read_text().split(maxsplit=1)[1]
    stolen.known_hosts.write_text(f"{stranger.address} {line}")
    begun = time.monotonic()
    try:
        _opened(stolen, HERE / "h.sock")
    except LaunchError as error:
        print(f"{error.message} | {error.hint} | {time.monotonic() - begun:.1f}")
    try:
        run_on(stolen, "true")
    except LaunchError as error:
        print(f"again: {error.message}")


def _opened(host: SshHost, door: Path) -> Link:
    """A link through which the machine has answered. Raises what cannot be mended."""
    link = Link(host, door, bare.SOCKET)
    link.start()
    wait_until(lambda: link.failure is not None or _answers(door), WAIT_SECONDS, "an answer")
    if link.failure is not None:
        link.close()
        raise link.failure
    return link


def _ssh_of(link: Link) -> int:
    """The pid of its ssh, of the next one between two of them."""
    wait_until(lambda: link._ssh is not None and link._ssh.poll() is None, WAIT_SECONDS, "an ssh")
    assert link._ssh is not None
    return link._ssh.pid


def _seconds_to_mend(link: Link, door: Path) -> float:
    os.kill(_ssh_of(link), signal.SIGKILL)
    begun = time.monotonic()
    wait_until(lambda: _answers(door), WAIT_SECONDS, "an answer")
    return time.monotonic() - begun


def _answers(door: Path) -> bool:
    try:
        get_json(door, "/healthz", timeout_seconds=2)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    _, rented = bare.rent(HERE)
    bare.answer(rented)
    {"frozen": frozen, "killed": killed, "swapped": swapped}[sys.argv[1]](rented)
