"""Runs one command and leaves none of its descendants: `python -m runtime.tether --grace 10 -- COMMAND…`.

vLLM and torchrun start processes of their own, which a death signal on their parent does not reach. The
tether stands between: it adopts orphans, and when the command ends, at a SIGTERM or when the supervisor dies
(its death signal is SIGTERM), it ends the whole tree within the grace and exits with the command's code (128
+ the signal's number when a signal ended it).
Neighbours: supervision.py starts every child through it. Knows nothing of the command.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time

from runtime.shared import process_table, processes

_SIGNALS = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main(arguments: list[str]) -> int:
    """Run the command to its end; returns the exit code."""
    parser = argparse.ArgumentParser(prog="runtime.tether")
    parser.add_argument("--grace", type=float, default=10.0, help="seconds between SIGTERM and SIGKILL")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command

    processes.adopt_orphans()
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    child = subprocess.Popen(command, preexec_fn=processes.preexec(signal.SIGKILL))
    try:
        return _follow(child.pid, options.grace)
    finally:
        processes.kill_descendants()


def command(command: list[str], grace_seconds: float) -> list[str]:
    """The command line that runs `command` on a tether."""
    return [sys.executable, "-m", "runtime.tether", "--grace", str(grace_seconds), "--", *command]


def held_by(tether: int) -> int | None:
    """The pid of the command a tether runs: its first child (later ones are orphans it adopted)."""
    return next(iter(process_table.children(tether)), None)


def _follow(pid: int, grace_seconds: float) -> int:
    kill_at: float | None = None
    while True:
        left = 3600.0 if kill_at is None else max(0.0, kill_at - time.monotonic())
        received = signal.sigtimedwait(_SIGNALS, left)
        if received is None:
            if kill_at is not None:
                return 128 + signal.SIGKILL
        elif received.si_signo == signal.SIGCHLD:
            ended = processes.reap()
            if pid in ended:
                code = ended[pid]
                return code if code >= 0 else 128 - code
        elif kill_at is None:
            kill_at = time.monotonic() + grace_seconds
            processes.signal_process(pid, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
