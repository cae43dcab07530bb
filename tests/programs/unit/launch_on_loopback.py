"""`launch` in a fresh network namespace that has no interface but loopback: `launch_on_loopback.py WORD…`.

Whatever asks a network fails at once.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys

SIOCSIFFLAGS = 0x8914
UP_AND_RUNNING = 0x41

if __name__ == "__main__":
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14s", b"lo", UP_AND_RUNNING, b""))
    os.execv(sys.executable, [sys.executable, "-m", "launcher.cli.main", *sys.argv[1:]])
