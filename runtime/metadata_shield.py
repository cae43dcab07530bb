"""Runs a command on a rented machine so that it cannot reach the machine's metadata service.

    python -m runtime.metadata_shield -- COMMAND…          (stdin, environment and exit code are the
    command's)

The metadata service (169.254.169.254) gives every process the credentials of the machine's role, and these
can rent more machines. SkyPilot's skylet needs them to end the machine; the runtime never does. So the
runtime runs in a Unix group of its own, and an iptables rule rejects that group's connections to the service.
`no-new-privs` takes sudo from it, with which it could remove the rule. The result is tested from inside. If
it did not work (a container, no sudo), one line on stderr reports it and the command runs all the same. One
way remains open: code in the runtime can rewrite the user's own files, which skylet reads.
Neighbours: `launcher/backends/ssh/machine_scripts.py` starts the keeper through it. Standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import grp
import os
import socket
import subprocess
import sys

GROUP = "slipway"
REACHABLE = "the runtime can reach the metadata service here"
# The networks of metadata services, by the tool that blocks them: link-local addresses of all clouds (on AWS
# also those of containers), Azure's second address, and EC2's and GCE's in IPv6. Port 53 stays open: GCE and
# OCI have their DNS server at the same address.
_BLOCKED_NETWORKS = {
    "iptables": ("169.254.0.0/16", "168.63.129.16/32"),
    "ip6tables": ("fd00:ec2::/32", "fd20:ce::254/128"),
}
_METADATA_SERVICES = (("169.254.169.254", 80), ("fd00:ec2::254", 80))
_CONNECT_SECONDS = 1.0
_SUDO_SECONDS = 20.0
# Variables that sudo removes or sets to root's in any case; none of them is secret.
_NOT_THROUGH_SUDO = ("HOME", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "PYTHONPATH", "USER")


def block_metadata() -> str | None:
    """Make the group and add the firewall's rules against it, as root or through sudo. Returns the reason if
    that is not possible here, None if it is done."""
    root = [] if os.getuid() == 0 else ["sudo", "-n"]
    trouble = _run([*root, "groupadd", "--force", "--system", GROUP])
    for tool, networks in _BLOCKED_NETWORKS.items():
        for network in networks:
            rule = ["OUTPUT", "-d", network, "-p", "tcp", "!", "--dport", "53"]
            rule += ["-m", "owner", "--gid-owner", GROUP, "-j", "REJECT"]
            if trouble is None and _run([*root, tool, "-w", "-C", *rule]) is not None:
                failed = _run([*root, tool, "-w", "-I", *rule])
                # A machine without IPv6 has nothing to close there; the attempt from inside tells.
                trouble = failed if tool == "iptables" else None
    return trouble


def in_blocked_group(command: list[str]) -> list[str]:
    """The command line that runs `command` in the group, as the same user, without any way to sudo."""
    root = [] if os.getuid() == 0 else ["sudo", "-n", "-E"]
    rights = [f"--reuid={os.getuid()}", f"--regid={GROUP}", "--init-groups", "--no-new-privs"]
    kept = [f"{name}={os.environ[name]}" for name in _NOT_THROUGH_SUDO if name in os.environ]
    return [*root, "setpriv", *rights, "env", *kept, *command]


def reachable_services() -> list[str]:
    """The addresses of the metadata services that accept a connection from this process."""
    found = []
    for address, port in _METADATA_SERVICES:
        with contextlib.suppress(OSError), socket.create_connection((address, port), _CONNECT_SECONDS):
            found.append(address)
    return found


def _run(command: list[str]) -> str | None:
    """Run a command to its end. Returns the last line of its stderr if it fails, None if it succeeds."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SUDO_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]}: {error}"
    lines = done.stderr.strip().splitlines() or [f"{' '.join(command[:3])} failed"]
    return lines[-1] if done.returncode else None


def _exec(command: list[str], trouble: str | None) -> None:
    """Replace this process by the command; print a line on stderr before, if a service can be reached.
    `trouble`: the reason why it could not be blocked."""
    if found := reachable_services():
        why = trouble or f"the firewall lets group {grp.getgrgid(os.getgid()).gr_name} through"
        print(f"{REACHABLE} ({', '.join(found)}): {why}", file=sys.stderr, flush=True)  # noqa: T201 - its one message
    os.execvp(command[0], command)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="runtime.metadata_shield")
    parser.add_argument("--inside", action="store_true", help="the group is this process's own")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if options.inside:
        _exec(command, None)
    again = [sys.executable, "-m", "runtime.metadata_shield", "--inside", "--", *command]
    trouble = block_metadata() or _run(in_blocked_group(["true"]))
    if trouble is not None:
        _exec(command, trouble)
    os.execvp((shielded := in_blocked_group(again))[0], shielded)


if __name__ == "__main__":
    main(sys.argv[1:])
