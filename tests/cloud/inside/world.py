"""The first process of a rig: alone in a pid, network and mount namespace, it holds everything else in it.

    unshare --pid --net --mount --fork … python world.py GATEWAY/BITS      (stdin: the owner's pipe)

When the owner ends, in whatever way, the pipe closes and this process exits; the kernel then kills what runs
in the rig, and with the last process go its mounts, links and addresses. Standard library only.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys

_PR_SET_PDEATHSIG = 1


def main(address: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C at the test's terminal is the test's to handle
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for command in (
        "ip link set lo up",
        "ip link add bridge type bridge",
        f"ip addr add {address} dev bridge",
        "ip link set bridge up",
    ):
        subprocess.run(command.split(), check=True)
    print("ready", flush=True)
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([0, woken], [], [])
        if 0 in ready and not os.read(0, 4096):
            return
        if woken in ready:
            os.read(woken, 4096)
            _reap()


def _reap() -> None:
    """Everything a dead parent leaves behind in the rig becomes ours."""
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                return
        except ChildProcessError:
            return


if __name__ == "__main__":
    main(sys.argv[1])
