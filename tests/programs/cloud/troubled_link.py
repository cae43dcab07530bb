"""A link to a machine in trouble, on a rig's laptop: `python troubled_link.py frozen|killed|swapped`."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from pathlib import Path

from launcher.base.errors import LaunchError
from launcher.base.unix_http import get_json
from launcher.machines.over_ssh.link import Host, Link, run_on
from tests.cloud import bare
from tests.support.waiting import wait_until

HERE = Path.cwd()
WAIT_SECONDS = 240.0


def frozen(host: Host) -> None:
    """ssh stopped in its tracks: to ssh itself nothing is wrong."""
    link = Link(host, HERE / "g.sock", bare.SOCKET)
    link.open()
    before = link.process
    assert before is not None
    os.kill(before, signal.SIGSTOP)
    begun = time.monotonic()
    wait_until(lambda: link.process != before and link.silent_seconds <= 1, what="an answer by another ssh")
    print(f"mended={time.monotonic() - begun:.1f}")
    link.close()


def killed(host: Host) -> None:
    """ssh killed again and again: how long until an answer comes."""
    door = HERE / "door" / "g.sock"
    link = Link(host, door, bare.SOCKET)
    link.open()
    times = []
    for number in range(5):
        if number == 3:  # as by somebody who sweeps out /tmp
            shutil.rmtree(door.parent)
        times.append(_seconds_to_mend(link, door))
        time.sleep(0.3)  # it works for a moment before it is killed again
    print(f"slowest={max(times):.2f}")
    link.close()


def swapped(host: Host) -> None:
    """Another machine at the same address, with a host key of its own."""
    link = Link(host, HERE / "g.sock", bare.SOCKET)
    link.open()
    link.close()
    _, stranger = bare.rent(HERE)
    stolen = Host(stranger.address, host.user, host.key, HERE / "known-both")
    line = host.known_hosts.read_text().split(maxsplit=1)[1]
    stolen.known_hosts.write_text(f"{stranger.address} {line}")
    begun = time.monotonic()
    try:
        Link(stolen, HERE / "h.sock", bare.SOCKET).open()
    except LaunchError as error:
        print(f"{error.message} | {error.hint} | {time.monotonic() - begun:.1f}")
    try:
        run_on(stolen, "true")
    except LaunchError as error:
        print(f"again: {error.message}")


def _seconds_to_mend(link: Link, door: Path) -> float:
    ssh = link.process
    assert ssh is not None
    os.kill(ssh, signal.SIGKILL)
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
