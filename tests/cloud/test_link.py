"""The link to a machine: a real sshd in namespaces of its own, a real ssh, killed, frozen and deceived."""

from __future__ import annotations

import sys
import textwrap

import pytest

from tests.cloud.rig import REPOSITORY, Rig

pytestmark = pytest.mark.slow

_START = """
import os, signal, time
from pathlib import Path
from launcher.errors import LaunchError
from launcher.machines.link import Link, run_on
from tests.cloud import bare
here = Path.cwd()
instance, host = bare.rent(here)
bare.answer(host)
link = Link(host, here / "g.sock", bare.SOCKET)
"""

# ssh stopped in its tracks: to ssh itself nothing is wrong.
_FROZEN = """
link.open()
before = link.process
os.kill(before, signal.SIGSTOP)
begun = time.monotonic()
while link.process == before or link.silent_seconds > 1:
    assert time.monotonic() - begun < 30
    time.sleep(0.05)
print(f"mended={time.monotonic() - begun:.1f}")
link.close()
"""

# A killed ssh: how long until an answer comes again.
_MENDED = """
import shutil
from launcher.machines.unix_http import get_json
door = here / "door" / "g.sock"
link = Link(host, door, bare.SOCKET)
link.open()
times = []
for number in range(5):
    if number == 3:  # as by somebody who sweeps out /tmp
        shutil.rmtree(door.parent)
    os.kill(link.process, signal.SIGKILL)
    begun = time.monotonic()
    while True:
        try:
            get_json(door, "/healthz", timeout_seconds=2)
            break
        except OSError:
            time.sleep(0.01)
    times.append(time.monotonic() - begun)
    time.sleep(0.3)
print(f"slowest={max(times):.2f}")
link.close()
"""

# Another machine at the same address, with a host key of its own.
_SWAPPED = """
link.open()
link.close()
another, stranger = bare.rent(here)
stolen = type(host)(stranger.address, host.user, host.key, here / "known-both")
line = host.known_hosts.read_text().split(maxsplit=1)[1]
stolen.known_hosts.write_text(f"{stranger.address} {line}")
begun = time.monotonic()
try:
    Link(stolen, here / "h.sock", bare.SOCKET).open()
except LaunchError as error:
    print(f"{error.message} | {error.hint} | {time.monotonic() - begun:.1f}")
try:
    run_on(stolen, "true")
except LaunchError as error:
    print(f"again: {error.message}")
"""


def _on_the_laptop(rig: Rig, program: str, seconds: float = 90) -> str:
    text = textwrap.dedent(_START + program)
    environ = rig.environ(PYTHONPATH=str(REPOSITORY))
    return rig.run([sys.executable, "-c", text], seconds=seconds, environ=environ).ok()


def _figure(said: str, name: str) -> float:
    return float(said.split(f"{name}=")[1].split()[0])


def test_a_frozen_link_is_noticed_and_mended(rig: Rig) -> None:
    assert _figure(_on_the_laptop(rig, _FROZEN), "mended") <= 20


def test_a_killed_link_is_mended_at_once(rig: Rig) -> None:
    assert _figure(_on_the_laptop(rig, _MENDED), "slowest") <= 3


def test_g15_a_swapped_host_key_is_refused_with_a_hint(rig: Rig) -> None:
    said = _on_the_laptop(rig, _SWAPPED)
    assert "is not the machine it was: its host key has changed | launch down" in said
    assert "again: " in said and said.count("host key has changed") == 2
